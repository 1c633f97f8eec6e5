"""Configuration of speculative decoding, and its values in the engine.

test_speculation_invariance.py checks that the output does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fakes
from ferrule import LLM, InvalidParameterError, ModelNotFoundError, SamplingParams
from ferrule._params.speculative import SpeculativeConfig

EngineOf = Callable[[LLM], fakes.Engine]

BAD_CONFIGS: list[tuple[object, str]] = [
    ("ngram", "must be a mapping"),
    ({"method": "medusa"}, "speculative_config.method must be one of ngram, draft_model, got 'medusa'"),
    ({}, "must be one of ngram, draft_model"),
    (
        {"method": "ngram", "tokens": 3},
        "speculative_config must be a mapping of method, num_speculative_tokens, adaptive,",
    ),
    (
        {"method": "ngram", "num_speculative_tokens": 0},
        "speculative_config.num_speculative_tokens must be an integer from 1 to 64, got 0",
    ),
    ({"method": "ngram", "num_speculative_tokens": 65}, "from 1 to 64"),
    (
        {"method": "ngram", "num_speculative_tokens": 2.5},
        "speculative_config.num_speculative_tokens must be an integer from 1 to 64, got 2.5",
    ),
    (
        {"method": "ngram", "prompt_lookup_max": 65},
        "speculative_config.prompt_lookup_max must be an integer from 1 to 64, got 65",
    ),
    (
        {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
        "speculative_config.prompt_lookup_min must be an integer from 1 to 4, got 5",
    ),
    (
        {"method": "ngram", "prompt_lookup_min": 0},
        "speculative_config.prompt_lookup_min must be an integer from 1 to 64, got 0",
    ),
    ({"method": "ngram", "adaptive": 1}, "speculative_config.adaptive must be True or False, got 1"),
    ({"method": "ngram", "model": "tiny"}, "speculative_config.model is not supported with method ngram, got 'tiny'"),
    ({"method": "draft_model"}, "speculative_config.model must be the path or name of the draft model, got None"),
    ({"model": 3}, "speculative_config.model must be the path or name of the draft model, got 3"),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_invalid_configuration(config: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        LLM(speculative_config=config)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


BAD_PREDICTIONS: list[tuple[object, str]] = [
    (3, "must be text or a list of token ids"),
    (b"text", "must be text or a list of token ids"),
    ([1, -1], "prediction[1] must be an integer from 0 to 4294967295, got -1"),
    ([1, "a"], "prediction[1] must be an integer from 0 to 4294967295, got 'a'"),
    ({"type": "content"}, 'prediction must be {"type": "content", "content": text or a list of {"type": "text",'),
    (
        {"type": "image", "content": "a"},
        'prediction must be {"type": "content", "content": text or a list of {"type": "text",',
    ),
    (
        {"type": "content", "content": [{"type": "image_url"}]},
        'prediction must be {"type": "content", "content": text or a list of {"type": "text",',
    ),
    ("a" * ((1 << 22) + 1), "prediction must be text of at most 4194304 characters, got"),
]


@pytest.mark.parametrize(("prediction", "message"), BAD_PREDICTIONS)
def test_invalid_prediction(prediction: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(prediction=prediction)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_predicted_token_outside_vocabulary(llm: LLM) -> None:
    with pytest.raises(
        InvalidParameterError, match="prediction must be token ids from 0 to 4095, the vocabulary, got 5000"
    ):
        llm.generate("x", SamplingParams(prediction=[3, 5000]))


def test_prediction_is_passed_to_engine_as_tokens(llm: LLM, engine_of: EngineOf) -> None:
    text = "Once upon a time"
    content = {
        "type": "content",
        "content": [{"type": "text", "text": "Once upon"}, {"type": "text", "text": " a time"}],
    }
    seen: list[list[int]] = []

    class Watched(dict[int, Any]):
        def __setitem__(self, request: int, sequence: Any) -> None:
            seen.append(sequence.params["prediction"])
            super().__setitem__(request, sequence)

    engine_of(llm).running = Watched()
    for prediction in (None, text, content, llm.tokenize(text, add_special_tokens=False)):
        llm.generate("A tale.", SamplingParams(max_tokens=1, prediction=prediction))
    ids = llm.tokenize(text, add_special_tokens=False)
    assert seen == [[], ids, ids, ids]


def test_options_are_passed_to_engine(llm: LLM, engine_of: EngineOf) -> None:
    assert engine_of(llm).options["speculative_config"] is None
    with LLM(speculative_config={"method": "ngram", "prompt_lookup_max": 1}) as ngram:
        assert engine_of(ngram).options["speculative_config"] == {
            "num_speculative_tokens": 15,
            "prompt_lookup": [1, 1],
            "adaptive": True,
        }
        assert engine_of(ngram).draft is None
    config = {"model": "tiny", "quantization": "int4", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(quantization="bf16", max_model_len=100, speculative_config=config) as drafted:
        engine = engine_of(drafted)
        assert engine.options["speculative_config"] == {
            "num_speculative_tokens": 3,
            "prompt_lookup": None,
            "adaptive": False,
        }
        assert engine.draft is not None
        spec, directory, options = engine.draft
        assert spec == drafted._files.spec.to_json()
        assert directory == str(drafted._files.path)
        assert '"quantization": "int4"' in options
        assert '"max_model_len": 100' in options


def test_missing_draft_model(fake_engine: type[fakes.Engine]) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM(speculative_config={"model": "./no-such-model"})


def test_prompt_lookup_min_raises_prompt_lookup_max() -> None:
    read = SpeculativeConfig.read({"method": "ngram", "prompt_lookup_min": 20})
    assert read is not None
    assert (read.prompt_lookup_min, read.prompt_lookup_max) == (20, 20)
