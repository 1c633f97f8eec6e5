"""What an engine has done since it began, in numbers: for dashboards and for admission."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, cast

from ferrule._validation import check_number


@dataclass(frozen=True)
class Histogram:
    """How often a duration fell between bounds, as Prometheus has it, but not cumulative."""

    bounds: tuple[float, ...]
    """Upper bounds in seconds, ascending, each inclusive."""
    counts: tuple[int, ...]
    """For each bound, and at the end for what is above the last."""
    sum: float
    """Seconds."""
    count: int

    @property
    def mean(self) -> float | None:
        """Seconds; None before the first observation."""
        return self.sum / self.count if self.count else None

    def percentile(self, p: float) -> float | None:
        """Seconds that `p` percent of the observations stay below; None before the first observation.

        Even within each interval, as Prometheus' histogram_quantile takes it; above the last bound it is that bound.

        Raises InvalidParameterError for a `p` outside 0 to 100.
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
    """A snapshot. Counters only ever grow; gauges say how it is now; histograms are in seconds."""

    requests_finished: dict[str, int]
    """How they ended for the engine: `stop`, `length`, `abort`, `error`. A stop string is found outside of it: what it
    ends, with the finish_reason `stop`, is an `abort` here."""
    requests_refused: int
    """By the engine, whatever the reason, and by a full queue before they came to it."""
    prompt_tokens: int
    """Of each prompt once it is computed."""
    cached_prompt_tokens: int
    """Of these, not computed: taken from the prefix cache, or from another completion of the same prompt."""
    computed_tokens: int
    """Through the model, in prefill and decode, again after a preemption, and drafts whether accepted or not."""
    generated_tokens: int
    drafted_tokens: int
    """That were guessed and computed, to be verified."""
    accepted_tokens: int
    """Of these, those that were sampled indeed."""
    steps: int
    preemptions: int
    running: int
    """Sequences that hold pages: a gauge, as the next four."""
    waiting: int
    """Sequences that wait, new ones and those that gave their pages up."""
    pages_total: int
    pages_free: int
    """Pages that no request holds."""
    pages_cached: int
    """Of these, kept for requests that begin with the same tokens."""
    prefix_queries_tokens: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits_tokens: int
    disk_hits_tokens: int
    """Of these, read from `prefix_cache_dir`."""
    disk_stored_bytes: int
    queue_seconds: Histogram
    """From arrival until first scheduled; noted with the first token."""
    prefill_seconds: Histogram
    """From there to the first token."""
    time_to_first_token_seconds: Histogram
    inter_token_seconds: Histogram
    decode_seconds: Histogram
    """From the first token to the last."""
    step_seconds: Histogram

    @classmethod
    def from_json(cls, text: str) -> EngineMetrics:
        """As the native module gives it; what this version does not know is left out."""
        given: dict[str, Any] = json.loads(text)
        return cls(**{field.name: _value(given[field.name]) for field in fields(cls)})


def _value(given: Any) -> Any:
    if not isinstance(given, dict) or "bounds" not in given:
        return cast("Any", given)
    histogram = cast("dict[str, Any]", given)
    bounds, counts = tuple(histogram["bounds"]), tuple(histogram["counts"])
    return Histogram(bounds, counts, float(histogram["sum"]), int(histogram["count"]))
