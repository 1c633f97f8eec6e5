"""Rows of logits against each other, and against what came next: everything in float64.

Rows are worked on a few at a time, so that what is made of them stays in the cache, however large the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ferrule.errors import EngineError

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

NUMBERS_AT_ONCE = 1 << 17
"""One megabyte of float64."""


@dataclass(frozen=True)
class Divergences:
    """Differences of two models at some tokens; every field is `[tokens]`, natural logarithms."""

    kld: Floats
    """KL divergence of the model from the reference: the sum of p_reference x ln(p_reference / p_model)."""
    logprob: Floats
    """Log-probability of the actual token by the model."""
    reference_logprob: Floats
    top: Ids
    """The model's likeliest token."""
    top_logprob: Floats
    reference_top: Ids
    reference_top_logprob: Floats

    @classmethod
    def joined(cls, parts: list[Divergences]) -> Divergences:
        """One after the other."""
        import numpy as np

        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def token_logprobs(logits: npt.NDArray[np.float32], targets: Ids) -> Floats:
    """The log-probability `[tokens]` of each target by its row of `logits [tokens, vocab]`.

    Raises EngineError for a row of NaN or infinity.
    """
    result = np.empty(len(targets))
    for rows in _blocks(logits):
        result[rows] = _of(_log_softmax(logits[rows]), targets[rows])
    return result


def divergences(logits: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], targets: Ids) -> Divergences:
    """Compares `logits [tokens, vocab]` with those of a reference; `targets [tokens]` are what came next.

    Raises EngineError for a row of NaN or infinity.
    """
    parts: list[Divergences] = []
    for rows in _blocks(logits):
        ours, theirs, wanted = _log_softmax(logits[rows]), _log_softmax(reference[rows]), targets[rows]
        weights = np.exp(theirs)
        with np.errstate(invalid="ignore"):
            difference = theirs - ours
            kld = np.einsum("tv,tv->t", weights, difference)
        if np.isnan(kld).any():
            # Tokens that the reference forbids add nothing; tokens that only the model forbids make it infinite.
            difference[weights == 0] = 0
            kld = np.einsum("tv,tv->t", weights, difference)
        # Rounding can make nearly equal rows less than equal.
        kld = np.maximum(kld, 0)
        # Of the logits themselves: the logarithm can round two to one.
        top, reference_top = logits[rows].argmax(axis=1), reference[rows].argmax(axis=1)
        parts.append(
            Divergences(
                kld=kld,
                logprob=_of(ours, wanted),
                reference_logprob=_of(theirs, wanted),
                top=top,
                top_logprob=_of(ours, top),
                reference_top=reference_top,
                reference_top_logprob=_of(theirs, reference_top),
            )
        )
    return Divergences.joined(parts)


def _blocks(logits: npt.NDArray[np.float32]) -> Iterator[slice]:
    rows, vocab = logits.shape
    count = max(1, NUMBERS_AT_ONCE // vocab)
    return (slice(first, min(first + count, rows)) for first in range(0, rows, count))


def _log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    highest = logits.max(axis=1, keepdims=True)
    # Negative infinity is a model's own way to forbid a token, but not all of them.
    if not np.isfinite(highest).all():
        raise EngineError("the model's logits are not finite: NaN or infinity")
    shifted = logits.astype(np.float64) - highest
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _of(rows: Floats, columns: Ids) -> Floats:
    return rows[np.arange(len(columns)), columns]
