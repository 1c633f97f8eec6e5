"""The small model that ships with ferrule, on the engine itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule import LLM, ConfigError, InvalidParameterError, ModelFileError, PromptError, SamplingParams
from ferrule._loading import read_model_files
from ferrule._loading.shapes import find_shape, shape_names
from ferrule._text.prompt import TokensPrompt

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(threads=2) as llm:
        yield llm


def test_capital_of_france(tiny: LLM) -> None:
    assert "Paris" in tiny.generate("The capital of France is", GREEDY)[0].outputs[0].text
    likeliest = tiny.next_token_probs("The capital of France is", top=3)
    assert likeliest[0][0] == " Par"
    assert likeliest[0][1] > 0.9
    assert [p for _, p in likeliest] == sorted((p for _, p in likeliest), reverse=True)


def test_chat(tiny: LLM) -> None:
    answer = tiny.chat([{"role": "user", "content": "Where is Cairo?"}], SamplingParams(temperature=0))[0].outputs[0]
    assert "Egypt" in answer.text
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_stream_equals_generate(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=60, logprobs=3)
    whole = tiny.generate("Once upon a time,", params)[0].outputs[0]
    deltas = list(tiny.stream("Once upon a time,", params))
    assert "".join(delta.text for delta in deltas) == whole.text
    last = deltas[-1].output
    assert last is not None
    assert last.outputs[0] == whole


def test_explain_traces_generated_tokens(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_k=5, seed=1, max_tokens=10)
    steps = list(tiny.explain("Once upon a time,", params))
    assert [step.token_id for step in steps] == tiny.generate("Once upon a time,", params)[0].outputs[0].token_ids
    for step in steps:
        assert step.draw is not None
        assert [c.dropped_by for c in step.candidates[:5]] == [None] * 5
        assert {c.dropped_by for c in step.candidates[6:]} == {"top_k"}
        assert sum(c.final_probability for c in step.candidates) == pytest.approx(1)
        assert [(stage.name, stage.tokens_left) for stage in step.stages] == [
            ("temperature", tiny.info()["vocab_size"]),
            ("top_k", 5),
        ]
        for candidate in step.candidates:
            assert candidate.stage_probabilities[1] == pytest.approx(candidate.final_probability)
        probabilities = np.array([c.final_probability for c in step.candidates[:5]])
        assert step.stages[1].entropy == pytest.approx(-(probabilities * np.log(probabilities)).sum())


def test_entropies_equal_entropy_of_logits(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.7, top_k=3, seed=1, max_tokens=10, entropy=True, ignore_eos=True)
    output = tiny.generate("Once upon a time,", params)[0]
    completion = output.outputs[0]
    rows = tiny.logits([*output.prompt_token_ids, *completion.token_ids], first=len(output.prompt_token_ids) - 1)
    rows = rows[:-1].astype(np.float64)
    probabilities = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    expected = -(probabilities * np.log(probabilities)).sum(axis=1)
    assert completion.entropies == pytest.approx(expected.tolist(), rel=1e-9)
    assert tiny.generate("x", GREEDY)[0].outputs[0].entropies is None
    deltas = list(tiny.stream("Once upon a time,", params))
    assert [one for delta in deltas for one in delta.entropies or []] == completion.entropies
    assert all(len(delta.entropies or []) == len(delta.token_ids) for delta in deltas)
    assert all(delta.entropies is None for delta in tiny.stream("x", GREEDY))


def test_bad_words_are_never_generated(tiny: LLM) -> None:
    prompt = "The capital of France is"
    assert "Paris" in tiny.generate(prompt, GREEDY)[0].outputs[0].text
    for words in ("Paris", ["x", " Paris"]):
        params = replace(GREEDY, bad_words=words)
        assert "Paris" not in tiny.generate(prompt, params)[0].outputs[0].text
    ids = tiny.tokenize(" Paris")
    assert "Paris" not in tiny.generate(prompt, replace(GREEDY, bad_words_ids=[ids[-1:]]))[0].outputs[0].text


def test_dry_breaks_repetition_loops(tiny: LLM) -> None:
    """DRY ends the loop of a greedy continuation, unless sequence breakers occur everywhere in it."""
    prompt = "Paris is in France. Paris is in France. Paris is in"
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = tiny.generate(prompt, params)[0].outputs[0].token_ids
    dry = replace(params, dry_multiplier=100.0, dry_allowed_length=1)
    without = tiny.generate(prompt, dry)[0].outputs[0].token_ids
    text = [*tiny.tokenize(prompt)]
    for token in without:
        followed = {text[i + 1] for i in range(1, len(text) - 1) if text[i] == text[-1]}
        # A token that contains a breaker is neither penalized nor part of a repeat.
        words = [tiny.token_text(each) for each in (text[-1], token)]
        assert token not in followed or any(breaker in word for word in words for breaker in '\n:"*')
        text.append(token)
    assert without != plain
    everywhere = replace(dry, dry_sequence_breakers=list("abcdefghijklmnopqrstuvwxyz ,"))
    assert tiny.generate(prompt, everywhere)[0].outputs[0].token_ids == plain


def test_first_tokens_arrive_in_time() -> None:
    """The first token is specified to take two seconds after the command; the assertion has fivefold slack."""
    command = [sys.executable, "-m", "ferrule", "run", "The capital of France is", "-n", "4"]
    start = time.monotonic()
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 10
    assert "Paris" in process.stdout


def test_engine_limits_of_prompts_and_parameters() -> None:
    with LLM(max_model_len=64) as llm:
        with pytest.raises(PromptError, match="64"):
            llm.generate({"prompt_token_ids": [5] * 64})
        with pytest.raises(PromptError, match="64"):
            llm.logits([5] * 65)
        output = llm.generate({"prompt_token_ids": [5] * 60}, SamplingParams(ignore_eos=True))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")
    with pytest.raises(InvalidParameterError, match="max_model_len"):
        LLM(max_model_len=1_000_000)


@pytest.fixture
def golden_with(tmp_path: Path) -> Callable[..., Path]:
    """A golden checkpoint with other values in its config.json."""

    def make(**changes: object) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(GOLDEN / "llama", directory)
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return directory

    return make


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"vocab_size": 321}, ("model.embed_tokens.weight", "321", "320")),
        ({"hidden_size": 128, "head_dim": 16}, ("128", "64")),
        ({"num_hidden_layers": 4}, ("model.layers.3",)),
        ({"intermediate_size": 161}, ("mlp", "161", "160")),
    ],
)
def test_config_that_contradicts_weights(
    changes: dict[str, object], names: tuple[str, ...], golden_with: Callable[..., Path]
) -> None:
    with pytest.raises((ConfigError, ModelFileError)) as caught:
        LLM(golden_with(**changes))
    assert all(name in str(caught.value) for name in names), caught.value


@pytest.mark.parametrize("quantization", ["bf16", "int8", "int4"])
def test_dummy_load_format_uses_random_weights(quantization: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    prompt: list[TokensPrompt] = [{"prompt_token_ids": [5, 6, 7]}]
    options: dict[str, Any] = {"quantization": quantization, "load_format": "dummy"}
    with LLM(tmp_path, **options) as llm, LLM(tmp_path, **options, threads=1) as again:
        assert not llm.info()["tokenizer"]
        logits = llm.logits([5, 6, 7])
        assert 0.1 < float(logits.std()) < 10
        assert (logits == again.logits([5, 6, 7])).all()
        assert len(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids) == 8
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        LLM(tmp_path)
    with pytest.raises(InvalidParameterError, match="load_format must be one of auto, dummy, got 'random'"):
        LLM(tmp_path, load_format="random")
    with pytest.raises(InvalidParameterError, match=r"shape must be one of deepseek-v2-3b, .*, got 'llama-2b'"):
        LLM.from_shape("llama-2b")


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_has_a_spec(name: str) -> None:
    spec = read_model_files(find_shape(name)).spec
    assert spec.vocab_size >= 32_000
    assert spec.hidden_size >= 1024
