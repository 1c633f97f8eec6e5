"""Runs a model on random tokens and records the arrival times of its tokens."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ferrule._api.llm import LLM
from ferrule._bench.machine import Ceilings, Machine, between
from ferrule._engine.energy import EnergyMeter
from ferrule._params.sampling import SamplingParams
from ferrule.errors import EngineError, InvalidParameterError

PROMPT_TOKENS = 512
"""Default length of a prompt."""
GENERATED_TOKENS = 128
"""Default number of tokens that a sequence generates."""
REPEAT = 3
"""Default number of runs, whose medians are shown."""


@dataclass(frozen=True)
class Point:
    """Workload of a measurement."""

    context: int
    """Tokens of each prompt."""
    batch: int
    """Number of concurrent sequences, each with a different prompt."""
    gen: int
    """Number of tokens that each sequence generates while all of them decode."""

    def __str__(self) -> str:
        sequences = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        return f"{sequences} at {self.context} tokens"

    def early(self, max_num_batched_tokens: int) -> int:
        """Returns the maximum number of tokens that the first sequence generates while other prompts are computed."""
        if self.batch == 1:
            return 0
        chunk = max(max_num_batched_tokens - self.batch, 1)  # decode rows come first
        return math.ceil((self.batch - 1) * self.context / chunk) + 1

    def check(self, info: dict[str, Any]) -> None:
        """Checks that a model has room for the workload.

        Raises InvalidParameterError.
        """
        early = self.early(info["max_num_batched_tokens"])
        length = self.context + early + self.gen
        if self.batch > info["max_num_batched_tokens"] // 2:
            limit = f"half of max_num_batched_tokens, {info['max_num_batched_tokens']}"
            raise InvalidParameterError("batch", self.batch, f"at most {limit}")
        if length > info["max_model_len"]:
            meanwhile = f" ({early} of them while the other prompts are computed)" if early else ""
            generated = f"{early + self.gen} generated tokens{meanwhile}"
            requirement = f"at most max_model_len ({info['max_model_len']}) together with {generated}"
            raise InvalidParameterError("context", self.context, requirement)
        if length * self.batch > info["kv_cache_tokens"]:
            most = info["kv_cache_tokens"] // length
            requirement = (
                f"at most {most} with {length} tokens each: the KV cache holds {info['kv_cache_tokens']} tokens"
            )
            raise InvalidParameterError("batch", self.batch, requirement)


@dataclass(frozen=True)
class Run:
    """Times of one run of a point."""

    prefill_seconds: float
    """Seconds from the start until every sequence had its first token."""
    first_token_seconds: float
    """Seconds until the first sequence had its first token."""
    decode_seconds: float
    """Seconds from the end of prefill until each sequence has generated `gen` more tokens."""
    gaps: list[float]
    """Seconds between consecutive tokens of a sequence while all sequences decode."""
    contexts: list[float]
    """Mean context length of each sequence in tokens, over the steps in which all sequences decode."""
    ceilings: Ceilings
    prefill_joules: float | None = None
    """Energy of the machine during prefill; None if it is not measured."""
    decode_joules_per_token: float | None = None
    """Energy of the machine during decode, for each token of all sequences; None if it is not measured."""


class Arrivals:
    """Arrival times of the tokens of each sequence, and the energy that the machine used meanwhile."""

    def __init__(self, point: Point, meter: EnergyMeter | None = None) -> None:
        self._point = point
        self._meter = meter
        self._energy = [None if meter is None else meter.read()]
        """Readings at the start, at the end of prefill and at the end."""
        self._decoded = 0
        """Number of tokens of all sequences since the end of prefill."""
        self._times: list[list[float]] = [[] for _ in range(point.batch)]
        self._without_token = point.batch
        """Number of sequences without a token."""
        self._begin = [0] * point.batch
        """Number of tokens of each sequence when prefill ended, that is, when the last sequence had its first token."""
        self._left = point.batch * (point.gen - 1)
        """Number of measured tokens that have not arrived."""

    @property
    def complete(self) -> bool:
        """Whether all measured tokens have arrived."""
        return self._without_token == 0 and self._left <= 0

    def add(self, sequence: int, tokens: int) -> None:
        """Records tokens that have just arrived."""
        times = self._times[sequence]
        if not times:
            self._without_token -= 1
        elif self._without_token == 0:
            wanted = self._begin[sequence] + self._point.gen - 1 - len(times)
            self._left -= max(min(tokens, wanted), 0)
        times.extend([time.perf_counter()] * tokens)
        self._decoded += tokens if any(self._begin) else 0
        if self._without_token == 0 and not any(self._begin):
            self._begin = [len(times) for times in self._times]
            self._read_energy()
        if self.complete:
            self._read_energy()

    def run(self, start: float, ceilings: Ceilings) -> Run:
        """Returns the times of the run."""
        ends = [begin + self._point.gen - 1 for begin in self._begin]
        windows = [times[begin - 1 : end] for times, begin, end in zip(self._times, self._begin, ends, strict=True)]
        first = max(times[0] for times in self._times)
        gaps = [after - before for window in windows for before, after in itertools.pairwise(window)]
        # The input of a step is the previous token; its context is the prompt and the output so far.
        contexts = [self._point.context + (begin + end - 1) / 2 for begin, end in zip(self._begin, ends, strict=True)]
        decode_joules = self._joules(1, max(window[-1] for window in windows) - first)
        return Run(
            prefill_joules=self._joules(0, first - start),
            decode_joules_per_token=None if decode_joules is None else decode_joules / self._decoded,
            prefill_seconds=first - start,
            first_token_seconds=min(times[0] for times in self._times) - start,
            decode_seconds=max(window[-1] for window in windows) - first,
            gaps=gaps,
            contexts=contexts,
            ceilings=ceilings,
        )

    def _read_energy(self) -> None:
        self._energy.append(None if self._meter is None else self._meter.read())

    def _joules(self, reading: int, seconds: float) -> float | None:
        """Returns the energy from a reading to the next one."""
        if self._meter is None:
            return None
        return self._meter.joules(self._energy[reading], self._energy[reading + 1], seconds)


def sweep(
    llm: LLM,
    points: Sequence[Point],
    machine: Machine,
    repeat: int,
    notify: Callable[[str], None],
) -> dict[Point, list[Run]]:
    """Runs all points in turn, `repeat` times, and measures the ceilings between the runs.

    Disturbed runs are repeated, at most `repeat` times for each point; all runs are returned.
    """
    vocab_size = int(llm.info()["vocab_size"])
    notify("warming up")  # the first access to each memory page is slow
    _run(
        llm,
        Point(min([32, *(point.context for point in points)]), max(point.batch for point in points), gen=2),
        vocab_size,
    )
    runs: dict[Point, list[Run]] = {point: [] for point in points}
    before = machine.measure()

    def once(point: Point) -> None:
        nonlocal before
        start, arrivals = _run(llm, point, vocab_size)
        after = machine.measure()
        runs[point].append(arrivals.run(start, between(before, after)))
        before = after

    for number, point in itertools.product(range(repeat), points):
        notify(f"run {number + 1} of {repeat}: {point}")
        once(point)
    for point in points:
        while len(runs[point]) < 2 * repeat and len(good(runs[point], machine)) < repeat:
            notify(f"repeating a disturbed run: {point}")
            once(point)
    return runs


def good(runs: Sequence[Run], machine: Machine) -> list[Run]:
    """Returns the runs that were not disturbed by other processes."""
    return [run for run in runs if not machine.is_bad(run.ceilings)]


def _run(llm: LLM, point: Point, vocab_size: int) -> tuple[float, Arrivals]:
    """Runs a point once and returns its start time and the arrivals."""
    generator = random.Random(point.batch)
    prompts = [generator.choices(range(vocab_size), k=point.context) for _ in range(point.batch)]
    params = SamplingParams.with_model_defaults(temperature=0, ignore_eos=True)
    arrivals = Arrivals(point, EnergyMeter.open())
    start = time.perf_counter()
    with closing(llm.stream_all([{"prompt_token_ids": prompt} for prompt in prompts], params)) as deltas:
        for sequence, delta in deltas:
            arrivals.add(sequence, len(delta.token_ids))
            if arrivals.complete:
                return start, arrivals
    raise EngineError(
        f"{point}: a sequence reached the end of the context before each had {point.gen} tokens while all decoded"
    )
