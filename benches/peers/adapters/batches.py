"""The loop of llama.cpp and of engines with its interface: rows in, latest tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from adapters.interface import Timing

BATCH = 512
"""Maximum number of rows in a call."""


class Row(NamedTuple):
    """A token to evaluate."""

    token: int
    position: int
    sequence: int
    wanted: bool
    """Whether its logits are needed."""


Evaluate = Callable[[list[Row]], dict[int, int]]
"""Evaluates at most BATCH rows; returns the likeliest next token of each sequence that has a row with logits."""


def timed(evaluate: Evaluate, prompts: list[list[int]], gen: int) -> Timing:
    """Evaluates the prompts with logits for their last tokens only, then one token of each per step.

    A call holds as many prompts, or parts of prompts, as fit.
    """
    start = time.perf_counter()
    tokens: dict[int, int] = {}
    rows = [
        Row(token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    for first in range(0, len(rows), BATCH):
        tokens |= evaluate(rows[first : first + BATCH])
    middle = time.perf_counter()
    for step in range(gen):
        tokens = evaluate(
            [Row(tokens[sequence], len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)]
        )
    return Timing(middle - start, time.perf_counter() - middle, gen * len(prompts))
