"""A pure-Python stand-in for `ferrule._native`: the same surface, arithmetic that a test can foresee.

The logits after a token depend on it and on its position alone, so a request's tokens do not depend on its neighbours.
`install()` puts it in place of the native module.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ferrule.errors import EngineError

MAX_MODEL_LEN = 2048


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


@dataclass(frozen=True)
class SampleTrace:
    candidates: list[Candidate]
    draw: float | None
    chosen: int


@dataclass(frozen=True)
class StepOutput:
    request_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    trace: list[SampleTrace] = field(default_factory=list[SampleTrace])


@dataclass
class _Sequence:
    prompt: list[int]
    params: dict[str, Any]
    output: list[int] = field(default_factory=list[int])


class Engine:
    """Deterministic. `script`, by prompt, makes an engine say what a test wants to hear."""

    script: Callable[[list[int]], list[int]] | None = None
    """The tokens that follow a prompt; then token 2."""
    step_seconds = 0.0
    interrupt_at: int | None = None
    """The step that raises KeyboardInterrupt, once, before it changes anything."""
    error_at: int | None = None
    """The step that ends every request with an error."""

    def __init__(
        self, spec: str, model_dir: str, options: str, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.spec: dict[str, Any] = json.loads(spec)
        self.options: dict[str, Any] = json.loads(options)
        self.vocab_size: int = self.spec["vocab_size"]
        self.max_model_len: int = min(self.options["max_model_len"] or MAX_MODEL_LEN, MAX_MODEL_LEN)
        self.running: dict[int, _Sequence] = {}
        self.aborted: list[int] = []
        self.next_id = 0
        self.steps = 0
        self.stepping = False
        if progress is not None:
            for done in (0, 50, 100):
                progress(done, 100)

    def add_request(self, prompt_token_ids: list[int], params: str) -> int:
        self._alone()
        self.next_id += 1
        self.running[self.next_id] = _Sequence(prompt_token_ids, json.loads(params))
        return self.next_id

    def step(self) -> list[StepOutput]:
        self._alone()
        self.steps += 1
        if self.interrupt_at == self.steps:
            raise KeyboardInterrupt
        if self.step_seconds:
            self.stepping = True
            try:
                time.sleep(self.step_seconds)
            finally:
                self.stepping = False
        outputs = [self._advance(request_id, sequence) for request_id, sequence in list(self.running.items())]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.request_id]
        return outputs

    def abort(self, request_id: int) -> bool:
        self._alone()
        self.aborted.append(request_id)
        return self.running.pop(request_id, None) is not None

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def logits(self, token_ids: list[int]) -> bytearray:
        self._alone()
        rows = [self._logits(token, position) for position, token in enumerate(token_ids)]
        return bytearray(b"".join(struct.pack(f"<{self.vocab_size}f", *row) for row in rows))

    def info(self) -> str:
        return json.dumps(
            {
                "isa": "fake",
                "threads": self.options["threads"] or 1,
                "quantization": "f32" if self.options["quantization"] == "auto" else self.options["quantization"],
                "kv_cache_dtype": self.options["kv_cache_dtype"],
                "weight_bytes": 20_000_000,
                "weight_bytes_per_token": 20_000_000,
                "layer_parameters": 4_000_000,
                "parameters": 5_000_000,
                "kv_bytes_per_token": 16,
                "kv_windows": [{"window": None, "bytes_per_token": 10}, {"window": 32, "bytes_per_token": 6}],
                "kv_cache_tokens": 4096,
                "max_model_len": self.max_model_len,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 512,
            }
        )

    def _alone(self) -> None:
        if self.stepping:
            raise EngineError("called by two threads at once")

    def _logits(self, token: int, position: int) -> list[float]:
        scores = self._scores(token, position)
        return [scores.get(token_id, -10.0) for token_id in range(self.vocab_size)]

    def _scores(self, token: int, position: int) -> dict[int, float]:
        """Logits of a few tokens; the others are far below. None is a special token of the embedded model."""
        generator = random.Random(token * 1_000_003 + position)
        return {generator.randrange(7, self.vocab_size): generator.gauss(0, 3) for _ in range(40)}

    def _advance(self, request_id: int, sequence: _Sequence) -> StepOutput:
        if self.error_at == self.steps:
            return StepOutput(request_id, [], "error", error="logits are not finite")
        params = sequence.params
        said = len(sequence.output)
        logprobs: list[TokenLogprobs] = []
        trace: list[SampleTrace] = []
        if self.script is not None:
            script = type(self).script(sequence.prompt)  # type: ignore[misc]
            token = script[said] if said < len(script) else 2
            scores = {token: 1.0, 0: -1.0}
        else:
            last, position = [*sequence.prompt, *sequence.output][-1], len(sequence.prompt) + said - 1
            scores = self._scores(last, position)
            draw = random.Random(f"{params['seed']} {said}").random() if params["temperature"] else None
            token = self._pick(scores, params["temperature"], draw)
        if params["logprobs"] is not None:
            logprobs = [self._logprobs(scores, token, params["logprobs"])]
        if params["trace"] is not None:
            trace = [self._trace(scores, token, params)]
        sequence.output.append(token)
        if token in params["stop_token_ids"] and said + 1 > params["min_tokens"]:
            return StepOutput(request_id, [token], "stop", token, logprobs=logprobs, trace=trace)
        finish = "length" if said + 1 >= params["max_tokens"] else None
        return StepOutput(request_id, [token], finish, logprobs=logprobs, trace=trace)

    @staticmethod
    def _pick(scores: dict[int, float], temperature: float, draw: float | None) -> int:
        if draw is None:
            return max(scores, key=lambda token: (scores[token], -token))
        weights = {token: math.exp(score / temperature) for token, score in scores.items()}
        left = draw * sum(weights.values())
        for token, weight in weights.items():
            left -= weight
            if left <= 0:
                return token
        return max(scores)

    @staticmethod
    def _logprobs(scores: dict[int, float], token: int, count: int) -> TokenLogprobs:
        total = math.log(sum(map(math.exp, scores.values())))
        order = sorted(scores, key=lambda t: (-scores[t], t))
        ranked = [(t, scores[t] - total, rank) for rank, t in enumerate(order, start=1)]
        return TokenLogprobs(next(entry for entry in ranked if entry[0] == token), ranked[:count])

    def _trace(self, scores: dict[int, float], token: int, params: dict[str, Any]) -> SampleTrace:
        ranked = self._logprobs(scores, token, params["trace"]).top
        candidates = [
            Candidate(t, scores[t], math.exp(p), math.exp(p) if rank <= 3 else 0.0, None if rank <= 3 else "top_k")
            for t, p, rank in ranked
        ]
        return SampleTrace(candidates, 0.5 if params["temperature"] else None, token)


class Ceilings:
    """A machine of round numbers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    read_bytes = 1 << 30
    measured = 0

    def measure(self, *, alone: bool = False) -> tuple[float, float, float, float]:
        Ceilings.measured += 1
        threads = 1 if alone else self.threads
        return 20e9, 1000e9 * threads, 100e9 * threads, 5e9 * threads


def module(engine: type[Engine] = Engine) -> types.ModuleType:
    """A module in the shape of `ferrule._native`."""
    native = types.ModuleType("ferrule._native")
    native.__dict__.update(Engine=engine, Ceilings=Ceilings, version="0.0.0", isa=lambda: "fake", cpu_count=lambda: 2)
    return native


def install() -> None:
    """Puts the fake where `from ferrule import _native` finds it: for programs that tests start."""
    import ferrule

    sys.modules["ferrule._native"] = ferrule.__dict__["_native"] = module()
