"""Token counts and durations of a request in llama.cpp's form."""

from __future__ import annotations

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
    """Tokens of the prompt that were computed."""
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


def timings(*outputs: RequestOutput) -> Timings:
    """Returns the timings of one or several prompts, running or finished; their durations are added."""
    found = [output.metrics for output in outputs]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    computed = sum(each.prompt_tokens for each in found) - cached
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
