"""Reasons for sampled tokens, as sentences."""

from __future__ import annotations

from collections.abc import Iterable

from ferrule.outputs import Candidate, Explanation


def reason(step: Explanation) -> str:
    """Returns the reason for the sampled token, as a sentence."""
    if step.draw is None:
        return f"Greedy: {step.text!r} has the highest score of the tokens kept."
    share = next((c for c in step.candidates if c.token_id == step.token_id), None)
    probability = "" if share is None else f" (probability {share.final_probability:.2%})"
    return f"The random number {step.draw:.4f} selects {step.text!r}{probability}{_dropped(step.candidates)}."


def _dropped(candidates: Iterable[Candidate]) -> str:
    stages = dict.fromkeys(c.dropped_by for c in candidates if c.dropped_by is not None)
    return f"; {', '.join(stages)} dropped other tokens" if stages else ""
