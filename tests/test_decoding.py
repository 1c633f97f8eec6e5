"""Continuations under decoding settings against those of transformers (golden/decoding): all that is no beam search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, SamplingParams
from ferrule.prompt import TokensPrompt

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden"
CASES = [path.stem for path in sorted((GOLDEN / "decoding").glob("*.json")) if path.stem != "warpers"]
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Of transformers and of ferrule, where they differ."""


def params(arguments: dict[str, Any]) -> SamplingParams:
    """Greedy, and what the setting says."""
    given = {NAMES.get(name, name): value for name, value in arguments.items()}
    if "eos_token_id" in given:
        given["stop_token_ids"] = [given.pop("eos_token_id")]
    return SamplingParams(temperature=0, ignore_eos=True, **given)


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case: str) -> None:
    golden = json.loads((GOLDEN / "decoding" / f"{case}.json").read_text())
    settings = {name: each for name, each in golden["settings"].items() if "num_beams" not in each["arguments"]}
    assert len(settings) == 5
    prompt: TokensPrompt = {"prompt_token_ids": golden["prompt_token_ids"]}
    with LLM(GOLDEN / "logits" / case, quantization="f32", kv_cache_dtype="f32") as llm:
        outputs = llm.generate(
            [prompt] * len(settings), [params(setting["arguments"]) for setting in settings.values()]
        )
    found = {name: [each.outputs[0].token_ids] for name, each in zip(settings, outputs, strict=True)}
    assert found == {name: setting["sequences"] for name, setting in settings.items()}
