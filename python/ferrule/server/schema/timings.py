"""Token counts, durations and the progress of a request in llama.cpp's form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

from ferrule.outputs import RequestOutput

MILLISECONDS = 1e3


class Timings(BaseModel):
    """Token counts and durations in milliseconds; rates are 0 where nothing was measured.

    Clients of llama.cpp read them into types that have no null.
    """

    cache_n: int
    """Tokens of the prompt that the prefix cache had."""
    prompt_n: int
    """Tokens of the prompt that were computed so far."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    """Generated tokens."""
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    """Rate of the tokens after the first one, which the prompt's last step computes."""
    draft_n: int
    draft_n_accepted: int


class PromptProgress(BaseModel):
    """Progress of the computation of a prompt."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Tokens that the prefix cache had."""
    processed: int
    """Tokens that are computed so far, cached ones included."""
    time_ms: float
    """Milliseconds since the first part was scheduled."""


class ProgressReporter:
    """Selects the states of a prompt that a stream reports: the beginning, and each state with more of it computed.

    `asked` says whether the request asks for reports.
    """

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self._processed: int | None = None
        """Tokens in the last report."""

    def new(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """Yields the states to report up to this one."""
        if not self._asked or output.num_cached_tokens is None:
            return
        if self._processed is None:
            self._processed = output.num_cached_tokens
            begun = replace(output.metrics, output_tokens=0, processed_tokens=self._processed, prefill_time=0.0)
            yield replace(output, metrics=replace(begun, decode_time=None))
        if output.metrics.processed_tokens > self._processed:
            self._processed = output.metrics.processed_tokens
            yield output


def prompt_progress(output: RequestOutput) -> PromptProgress:
    """Returns the progress of a prompt."""
    return PromptProgress(
        total=output.metrics.prompt_tokens,
        cache=output.num_cached_tokens or 0,
        processed=output.metrics.processed_tokens,
        time_ms=(output.metrics.prefill_time or 0.0) * MILLISECONDS,
    )


def timings(*outputs: RequestOutput) -> Timings:
    """Returns the timings of one or several prompts, running or finished; their durations are added."""
    found = [output.metrics for output in outputs]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    computed = sum(each.processed_tokens for each in found) - cached
    generated = sum(each.output_tokens for each in found)
    decoded = sum(max(each.output_tokens - 1, 0) for each in found)
    prefill = sum(each.prefill_time or 0.0 for each in found) * MILLISECONDS
    decode = sum(each.decode_time or 0.0 for each in found) * MILLISECONDS
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=prefill,
        prompt_per_token_ms=_ratio(prefill, computed),
        prompt_per_second=_ratio(computed * MILLISECONDS, prefill),
        predicted_n=generated,
        predicted_ms=decode,
        predicted_per_token_ms=_ratio(decode, decoded),
        predicted_per_second=_ratio(decoded * MILLISECONDS, decode),
        draft_n=sum(each.drafted_tokens for each in found),
        draft_n_accepted=sum(each.accepted_tokens for each in found),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
