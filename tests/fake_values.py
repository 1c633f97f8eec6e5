"""Values that the fake engine takes and returns, with the fields of those of `ferrule._native`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenLogprobs:
    sampled: tuple[int, float, int]
    top: list[tuple[int, float, int]]


@dataclass(frozen=True)
class Candidate:
    id: int
    logit: float
    probability: float
    final_probability: float
    dropped_by: str | None
    stage_probabilities: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class SampleTrace:
    candidates: list[Candidate]
    stages: list[tuple[str, int, float]]
    draw: float | None
    chosen: int


@dataclass(frozen=True)
class Beam:
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    stop_token: int | None = None


@dataclass(frozen=True)
class StepOutput:
    request_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    lost_stage: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    entropies: list[float] = field(default_factory=list[float])
    trace: list[SampleTrace] = field(default_factory=list[SampleTrace])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    beams: list[Beam] = field(default_factory=list[Beam])
    queued_seconds: float | None = None
    last_prefill_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    processed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class LoraAdapter:
    rank: int
    modules: list[str]
    bytes: int = 1000


@dataclass(frozen=True)
class Grammar:
    """A grammar that restricts nothing; it records its calls for tests."""

    constraint: dict[str, Any]


class Vocabulary:
    def __init__(self, tokens: list[bytes], special: set[int]) -> None:
        self.tokens, self.special = tokens, special

    def compile(self, constraint: str) -> Grammar:
        return Grammar(json.loads(constraint))
