"""The second turn of a chat continues at the end of the first prompt, in memory and after a restart, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, SamplingParams
from test_invariance import bits, load

pytestmark = pytest.mark.native

FORMATS = ("int8", "f16")
PAGE_TOKENS = 16
STEP_TOKENS = 64
PROMPT = [random.Random(1).randrange(7, 320) for _ in range(151)]
ANSWER_TOKENS = 20
NEW = [11, 12, 13, 14, 15]
"""Tokens of the user in the second turn."""


def chat(model: str, **more: Any) -> LLM:
    return load(model, FORMATS, STEP_TOKENS, 2, **more)


def ask(llm: LLM, tokens: list[int], count: int) -> tuple[list[tuple[int, list[tuple[int, str]]]], int]:
    """Returns `count` tokens with log-probabilities, and the number of tokens that were computed for them."""
    before = llm.metrics().computed_tokens
    greedy = SamplingParams(temperature=0, max_tokens=count, logprobs=20, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": tokens}, greedy)[0].outputs[0]
    return bits(output), llm.metrics().computed_tokens - before


@pytest.mark.parametrize("model", ["jamba", "lfm2", "nemotron_h", "qwen3_5_text"])
def test_second_turn_computes_only_the_tokens_after_the_first_prompt(model: str, tmp_path: Path) -> None:
    with chat(model, enable_prefix_caching=False) as llm:
        answer, computed = ask(llm, PROMPT, ANSWER_TOKENS)
        assert computed == len(PROMPT) + ANSWER_TOKENS - 1
        turn = [*PROMPT, *(token for token, _ in answer), *NEW]
        recomputed, computed = ask(llm, turn, ANSWER_TOKENS)
        assert computed == len(turn) + ANSWER_TOKENS - 1

    kept = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
    second = (recomputed, len(turn) - kept + ANSWER_TOKENS - 1)
    with chat(model) as llm:
        assert ask(llm, PROMPT, ANSWER_TOKENS)[0] == answer
        assert ask(llm, turn, ANSWER_TOKENS) == second

    with chat(model, prefix_cache_dir=tmp_path / "pages") as llm:
        assert ask(llm, PROMPT, ANSWER_TOKENS)[0] == answer
    with chat(model, prefix_cache_dir=tmp_path / "pages") as llm:
        assert ask(llm, turn, ANSWER_TOKENS) == second
        assert llm.metrics().disk_hits_tokens == kept
