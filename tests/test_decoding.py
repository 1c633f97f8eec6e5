"""Continuations under decoding settings against those of transformers (golden/decoding), beam searches among them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, BeamSearchParams, SamplingParams
from ferrule._text.prompt import TokensPrompt

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden"
CASES = [path.stem for path in sorted((GOLDEN / "decoding").glob("*.json")) if path.stem != "warpers"]
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_beams": "beam_width",
    "num_return_sequences": "n",
}
"""Names of transformers and of ferrule, where they differ."""


def named(arguments: dict[str, Any]) -> dict[str, Any]:
    """Converts a setting to the fields of ferrule."""
    given = {NAMES.get(name, name): value for name, value in arguments.items()}
    if "eos_token_id" in given:
        given["stop_token_ids"] = [given.pop("eos_token_id")]
    return {"ignore_eos": True, **given}


def read(case: str) -> tuple[TokensPrompt, dict[str, Any], dict[str, Any]]:
    """The prompt, the settings without beams, and those with beams."""
    golden = json.loads((GOLDEN / "decoding" / f"{case}.json").read_text())
    settings = golden["settings"]
    beams = {name: each for name, each in settings.items() if "num_beams" in each["arguments"]}
    plain = {name: each for name, each in settings.items() if name not in beams}
    return {"prompt_token_ids": golden["prompt_token_ids"]}, plain, beams


@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_equals_transformers(case: str) -> None:
    prompt, settings, _ = read(case)
    assert len(settings) == 5
    params = [SamplingParams(temperature=0, **named(setting["arguments"])) for setting in settings.values()]
    with LLM(GOLDEN / "logits" / case, quantization="f32", kv_cache_dtype="f32") as llm:
        outputs = llm.generate([prompt] * len(settings), params)
    found = {name: [each.outputs[0].token_ids] for name, each in zip(settings, outputs, strict=True)}
    assert found == {name: setting["sequences"] for name, setting in settings.items()}


@pytest.mark.parametrize("case", CASES)
def test_speculation_does_not_change_output(case: str) -> None:
    """Stages also apply to draft tokens."""
    prompt, settings, _ = read(case)
    params = [SamplingParams(temperature=0, **named(setting["arguments"])) for setting in settings.values()]
    predicted = [
        replace(one, prediction=setting["sequences"][0]) for one, setting in zip(params, settings.values(), strict=True)
    ]
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4, "adaptive": False}
    with LLM(GOLDEN / "logits" / case, quantization="f32", kv_cache_dtype="f32", speculative_config=drafts) as llm:
        for sampling in (params, predicted):
            outputs = llm.generate([prompt] * len(settings), sampling)
            found = {name: [each.outputs[0].token_ids] for name, each in zip(settings, outputs, strict=True)}
            assert found == {name: setting["sequences"] for name, setting in settings.items()}
            assert all(output.metrics.accepted_tokens > 0 for output in outputs) == (sampling is predicted)


@pytest.mark.parametrize("case", CASES)
def test_beam_search_equals_transformers(case: str) -> None:
    """Sequences, and scores to a millionth: transformers adds them up in float32.

    golden/beams has settings with penalties and with what is forbidden, made in the same way by transformers 5.23.
    """
    prompt, _, settings = read(case)
    settings |= json.loads((GOLDEN / "beams" / f"{case}.json").read_text())["settings"]
    assert len(settings) == 10
    with LLM(GOLDEN / "logits" / case, quantization="f32", kv_cache_dtype="f32") as llm:
        for name, setting in settings.items():
            output = llm.beam_search(prompt, BeamSearchParams(**named(setting["arguments"])))[0]
            # It pads them to the same length with the token that ends them.
            padded = max(len(each.token_ids) for each in output.sequences)
            found = [each.token_ids + each.token_ids[-1:] * (padded - len(each.token_ids)) for each in output.sequences]
            assert found == setting["sequences"], name
            assert [each.score for each in output.sequences] == pytest.approx(setting["scores"], rel=1e-6, abs=1e-6), (
                name
            )
