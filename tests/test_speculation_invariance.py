"""Outputs are the same bit by bit with and without speculation, for all sources and batches."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, InvalidParameterError, SamplingParams, quantize
from test_invariance import MODELS, alone, bits, load, params, prompts

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden"
MODELS["gemma2"] = GOLDEN / "logits" / "gemma2"
CASES = [("tiny", (weights, kv)) for weights in ("f32", "int8", "int4") for kv in ("f32", "f16", "bf16", "int8")] + [
    ("gemma2", ("f32", "f32")),
    ("gemma2", ("int8", "int8")),
    ("mistral_swa", ("int4", "f16")),
    ("deepseek_v3", ("f32", "f16")),
    ("deepseek_v3", ("int4", "int8")),
    ("gpt_oss", ("f32", "f16")),
    ("gpt_oss", ("int8", "int8")),
    ("bloom", ("f32", "f16")),
    ("llama_dynamic", ("f32", "f16")),
    ("gemma3n", ("int8", "int8")),
    ("gemma4_e", ("int8", "f16")),
    ("jamba", ("int8", "f16")),
    ("kimi_linear", ("int8", "int8")),
    ("minimax", ("int8", "f16")),
    ("recurrent_gemma", ("int8", "int8")),
    ("rwkv", ("int8", "auto")),
    ("deepseek_v4", ("int8", "int8")),
    ("glm_moe_dsa", ("f32", "f16")),
    ("glm_moe_dsa", ("int4", "int8")),
    ("lfm2", ("f32", "f16")),
    ("lfm2", ("int8", "int8")),
    ("minimax_m3", ("f32", "f32")),
    ("minimax_m3", ("int8", "int8")),
    ("qwen4_exp", ("f32", "f32")),
    ("qwen4_exp", ("int8", "int8")),
    ("zamba2", ("int8", "f32")),
]
ALWAYS = {"num_speculative_tokens": 5, "adaptive": False}


def predicted(model: str, formats: tuple[str, str]) -> list[SamplingParams]:
    """Returns predictions with an increasing number of errors: changed, removed and inserted tokens."""

    def mistaken(number: int) -> list[int]:
        tokens = [token for token, _ in alone(model, formats)[number]]
        for place in range(3, len(tokens), 12 - number):
            tokens[place : place + number % 3] = [7] * (1 + number % 2)
        return tokens

    return [replace(params(number), prediction=mistaken(number)) for number in range(8)]


@pytest.mark.parametrize(
    ("model", "formats", "tokens"), [(*case, (16, 512)[number % 2]) for number, case in enumerate(CASES)]
)
def test_predictions_do_not_change_output(model: str, formats: tuple[str, str], tokens: int) -> None:
    config = {"method": "ngram", **ALWAYS}
    with load(model, formats, tokens, 2, speculative_config=config) as llm:
        outputs = llm.generate(prompts(model), predicted(model, formats))
        assert [bits(output.outputs[0]) for output in outputs] == alone(model, formats)
        metrics = llm.metrics()
        assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
        assert metrics.drafted_tokens == sum(output.metrics.drafted_tokens for output in outputs)
        assert metrics.accepted_tokens == sum(output.metrics.accepted_tokens for output in outputs)
        assert metrics.pages_free == metrics.pages_total


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_draft_model_does_not_change_output(model: str, formats: tuple[str, str]) -> None:
    """The draft model is the model itself with fewer bits: most of its tokens are accepted."""
    config = {"model": str(MODELS[model]), "quantization": "int4", **ALWAYS}
    with load(model, formats, 64, 2, speculative_config=config) as llm:
        outputs = llm.generate(prompts(model), [params(number) for number in range(8)])
        assert [bits(output.outputs[0]) for output in outputs] == alone(model, formats)
        metrics = llm.metrics()
        assert 0 < metrics.accepted_tokens <= metrics.drafted_tokens


def test_packed_draft_model(tmp_path: Path) -> None:
    formats = ("int8", "int8")
    config = {"model": str(quantize(MODELS["tiny"], tmp_path / "draft", format="int4")), **ALWAYS}
    with load("tiny", formats, 64, 2, speculative_config=config) as llm:
        outputs = llm.generate(prompts("tiny"), [params(number) for number in range(8)])
        assert [bits(output.outputs[0]) for output in outputs] == alone("tiny", formats)
        assert llm.metrics().accepted_tokens > 0
        assert llm.info()["packed_file"] is None
        assert llm.info()["mapped_bytes"] > 0


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(("model", "formats"), [("tiny", ("int8", "int8")), ("deepseek_v3", ("f32", "f16"))])
def test_speculation_in_small_kv_cache(model: str, formats: tuple[str, str], enable_prefix_caching: bool) -> None:
    with load(model, formats, 64, 2) as llm:
        page_bytes = 16 * llm.info()["kv_bytes_per_token"]
    few: dict[str, Any] = {"kv_cache_memory": 20 * page_bytes, "enable_prefix_caching": enable_prefix_caching}
    with load(model, formats, 64, 2, speculative_config={"method": "ngram", **ALWAYS}, **few) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts(model), predicted(model, formats))
            assert [bits(output.outputs[0]) for output in outputs] == alone(model, formats)
        metrics = llm.metrics()
        assert metrics.preemptions > 0
        assert metrics.pages_free == metrics.pages_total


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3", "gemma2"])
@pytest.mark.parametrize("setting", ["greedy", "repetition_penalty_1.3"])
def test_speculative_output_equals_transformers(case: str, setting: str, adaptive: bool) -> None:
    golden = json.loads((GOLDEN / "decoding" / f"{case}.json").read_text())
    wanted = golden["settings"][setting]
    prompt, sequence = golden["prompt_token_ids"], wanted["sequences"][0]
    new = sequence[len(prompt) :] if sequence[: len(prompt)] == prompt else sequence
    plain = SamplingParams(
        temperature=0,
        max_tokens=wanted["arguments"]["max_new_tokens"],
        repetition_penalty=wanted["arguments"].get("repetition_penalty"),
    )
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4, "adaptive": adaptive}
    with LLM(GOLDEN / "logits" / case, quantization="f32", speculative_config=config) as llm:
        for prediction in (None, new, new[3:]):
            output = llm.generate({"prompt_token_ids": prompt}, replace(plain, prediction=prediction))[0]
            assert output.outputs[0].token_ids == new[: len(output.outputs[0].token_ids)]
            assert len(output.outputs[0].token_ids) == len(new)


def test_stop_string_within_draft_tokens() -> None:
    """Text and tokens end at the same position as without speculation."""
    plain = SamplingParams(temperature=0, max_tokens=40)
    with LLM(speculative_config={"method": "ngram", **ALWAYS}) as llm:
        whole = llm.generate("Once upon a time", plain)[0].outputs[0]
        stop = whole.text[30:34]
        stopped = replace(plain, stop=stop)
        with LLM() as without:
            expected = without.generate("Once upon a time", stopped)[0].outputs[0]
        output = llm.generate("Once upon a time", replace(stopped, prediction=whole.token_ids))[0]
        assert output.metrics.accepted_tokens > 0
        assert (output.outputs[0].text, output.outputs[0].token_ids) == (expected.text, expected.token_ids)
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_explain_covers_accepted_tokens() -> None:
    given = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    with LLM(speculative_config={"method": "ngram", "prompt_lookup_min": 1, **ALWAYS}) as llm, LLM() as without:
        expected = list(without.explain("One two one two one", given))
        tokens = [each.token_id for each in expected]
        assert list(llm.explain("One two one two one", replace(given, prediction=tokens))) == expected
        assert llm.metrics().accepted_tokens > 0


def test_draft_model_with_another_vocabulary_is_rejected() -> None:
    message = (
        "speculative_config.model must be a model with the same vocabulary of 4096 tokens, "
        "got 'a model with 320 tokens'"
    )
    with pytest.raises(InvalidParameterError, match=f"^{message}$"):
        LLM(speculative_config={"model": str(GOLDEN / "logits" / "llama")})


def test_documentation_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "speculative-decoding.md").read_text()
    examples: list[str] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    names: dict[str, Any] = {"__name__": "example"}
    for example in examples:
        exec(compile(example, "docs/speculative-decoding.md", "exec"), names)
    drafted, accepted = map(int, capsys.readouterr().out.split())
    assert drafted >= accepted >= 0
