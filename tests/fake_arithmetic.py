"""Predictable arithmetic of the fake engine: logits that depend on a token and its position alone."""

from __future__ import annotations

import math
import random
from typing import Any

from fake_values import Candidate, SampleTrace, TokenLogprobs


def logits(token: int, position: int, vocab_size: int) -> list[float]:
    scores = scores_after(token, position, vocab_size)
    return [scores.get(token_id, -10.0) for token_id in range(vocab_size)]


def scores_after(token: int, position: int, vocab_size: int) -> dict[int, float]:
    """Returns logits in which a few normal tokens of the embedded model are far above all others."""
    generator = random.Random(token * 1_000_003 + position)
    return {generator.randrange(7, vocab_size): generator.gauss(0, 3) for _ in range(40)}


def pick(scores: dict[int, float], temperature: float, draw: float | None) -> int:
    if draw is None:
        return max(scores, key=lambda token: (scores[token], -token))
    weights = {token: math.exp(score / temperature) for token, score in scores.items()}
    left = draw * sum(weights.values())
    for token, weight in weights.items():
        left -= weight
        if left <= 0:
            return token
    return max(scores)


def logprobs_of(scores: dict[int, float], token: int, count: int) -> TokenLogprobs:
    total = math.log(sum(map(math.exp, scores.values())))
    order = sorted(scores, key=lambda t: (-scores[t], t))
    ranked = [(t, scores[t] - total, rank) for rank, t in enumerate(order, start=1)]
    last = (token, -10.0 - total, len(order) + 1)
    return TokenLogprobs(next((entry for entry in ranked if entry[0] == token), last), ranked[:count])


def trace_of(scores: dict[int, float], token: int, params: dict[str, Any]) -> SampleTrace:
    ranked = logprobs_of(scores, token, params["trace"]).top
    candidates = [
        Candidate(t, scores[t], math.exp(p), left, None if rank <= 3 else "top_k", [left])
        for t, p, rank in ranked
        for left in [math.exp(p) if rank <= 3 else 0.0]
    ]
    stages = [("top_k", 3, 0.5)]
    return SampleTrace(candidates, stages, 0.5 if params["temperature"] else None, token)
