"""Metrics of an engine since it started: counters, gauges and histograms for dashboards and admission control."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, cast

from ferrule._validation import check_number


@dataclass(frozen=True)
class Histogram:
    """Histogram of durations in seconds, or of numbers of tokens.

    Counts are per bucket, and not cumulative as in Prometheus.
    """

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending, inclusive."""
    counts: tuple[int, ...]
    """Number of observations per bucket; the last bucket counts values above all bounds."""
    sum: float
    """Sum of the observations."""
    count: int
    """Number of observations."""

    @property
    def mean(self) -> float | None:
        """Mean; None before the first observation."""
        return self.sum / self.count if self.count else None

    def percentile(self, p: float) -> float | None:
        """Returns the `p`-th percentile; None before the first observation.

        Observations are assumed to be evenly distributed within a bucket, as in Prometheus' histogram_quantile. The
        result is at most the last bound.

        Raises InvalidParameterError if `p` is not from 0 to 100.
        """
        wanted = check_number("p", p, 0, 100) * self.count / 100
        if not self.count:
            return None
        below = 0
        edges = (0.0, *self.bounds)
        for low, high, count, reached in zip(edges, self.bounds, self.counts, accumulate(self.counts), strict=False):
            if count and reached >= wanted:
                return low + (high - low) * (wanted - below) / count
            below = reached
        return edges[-1]


@dataclass(frozen=True)
class EngineMetrics:
    """Snapshot of the metrics of an engine. Counters only increase, gauges are current values."""

    requests_finished: dict[str, int]
    """Counter of finished sequences by the engine's finish reason: `stop`, `length`, `abort`, `error`. Stop strings are
    matched outside the engine, so a sequence that ends at a stop string counts as `abort`."""
    requests_refused: int
    """Counter of requests that were refused, by the engine or because the queue was full."""
    prompt_tokens: int
    """Counter of prompt tokens; a prompt is counted when it has been computed."""
    cached_prompt_tokens: int
    """Counter of prompt tokens taken from the prefix cache, or from another completion of the same prompt."""
    computed_tokens: int
    """Counter of tokens that the model computed in prefill and decode. It includes draft tokens, and tokens that were
    computed again after a preemption."""
    generated_tokens: int
    """Counter of generated tokens."""
    drafted_tokens: int
    """Counter of draft tokens that were verified."""
    accepted_tokens: int
    """Counter of draft tokens that were accepted."""
    steps: int
    """Counter of engine steps."""
    preemptions: int
    """Counter of preemptions."""
    running: int
    """Gauge of sequences that hold pages."""
    waiting: int
    """Gauge of sequences in the queue, new or preempted."""
    pages_total: int
    """Gauge of the total number of pages of the KV cache."""
    pages_free: int
    """Gauge of pages that no request holds, including pages of the prefix cache."""
    pages_cached: int
    """Gauge of pages that no request holds and that the prefix cache keeps."""
    prefix_queries_tokens: int
    """Counter of prompt tokens that were looked up in the prefix cache."""
    prefix_hits_tokens: int
    """Counter of prompt tokens that were found in the prefix cache."""
    disk_hits_tokens: int
    """Counter of tokens found in the prefix cache with pages or states that were read from `prefix_cache_dir`."""
    disk_stored_bytes: int
    """Gauge of bytes in `prefix_cache_dir` at the last scan; it includes the files of other processes."""
    queue_seconds: Histogram
    """Time from arrival to the first scheduling; recorded at the first token."""
    prefill_seconds: Histogram
    """Time from the first scheduling to the first token."""
    time_to_first_token_seconds: Histogram
    """Time from arrival to the first token."""
    inter_token_seconds: Histogram
    """Time between two tokens."""
    decode_seconds: Histogram
    """Time from the first to the last token."""
    step_seconds: Histogram
    """Duration of an engine step."""
    step_tokens: Histogram
    """Number of tokens that a step computes, in prefill and decode, draft tokens included."""

    @classmethod
    def from_json(cls, text: str) -> EngineMetrics:
        """Reads the JSON of the native module; unknown fields are ignored."""
        given: dict[str, Any] = json.loads(text)
        return cls(**{field.name: _value(given[field.name]) for field in fields(cls)})


def _value(given: Any) -> Any:
    if not isinstance(given, dict) or "bounds" not in given:
        return cast("Any", given)
    histogram = cast("dict[str, Any]", given)
    bounds, counts = tuple(histogram["bounds"]), tuple(histogram["counts"])
    return Histogram(bounds, counts, float(histogram["sum"]), int(histogram["count"]))
