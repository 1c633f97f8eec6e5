"""Comparison of rows of logits with a reference and with the next tokens of the text, in float64.

Rows are processed in small blocks, so that intermediate results fit into the CPU cache for any vocabulary size.
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

BLOCK_ELEMENTS = 1 << 17
"""Maximum number of logits in a block: 1 MiB of float64."""


@dataclass(frozen=True)
class Divergences:
    """Predictions of a model and a reference at each token; every field is `[tokens]`, with natural logarithms."""

    kld: Floats
    """Kullback-Leibler divergence of the model from the reference: the sum of p_reference x ln(p_reference /
    p_model)."""
    logprob: Floats
    """Log-probability that the model assigns to the token of the text."""
    reference_logprob: Floats
    """Log-probability that the reference assigns to the token of the text."""
    top: Ids
    """Most likely token of the model."""
    top_logprob: Floats
    """Log-probability of `top` by the model."""
    reference_top: Ids
    """Most likely token of the reference."""
    reference_top_logprob: Floats
    """Log-probability of `reference_top` by the reference."""

    @classmethod
    def joined(cls, parts: list[Divergences]) -> Divergences:
        """Concatenates the parts in order."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def token_logprobs(logits: npt.NDArray[np.float32], targets: Ids) -> Floats:
    """Returns the log-probability `[tokens]` of each target by its row of `logits [tokens, vocab]`.

    Raises EngineError if a row has NaN or positive infinity, or only negative infinity.
    """
    result = np.empty(len(targets))
    for rows in _blocks(logits):
        result[rows] = _select(_log_softmax(logits[rows]), targets[rows])
    return result


def divergences(logits: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], targets: Ids) -> Divergences:
    """Compares `logits [tokens, vocab]` with those of a reference; `targets [tokens]` are the next tokens of the text.

    Raises EngineError if a row has NaN or positive infinity, or only negative infinity.
    """
    parts: list[Divergences] = []
    for rows in _blocks(logits):
        logprobs, reference_logprobs = _log_softmax(logits[rows]), _log_softmax(reference[rows])
        next_tokens = targets[rows]
        weights = np.exp(reference_logprobs)
        with np.errstate(invalid="ignore"):
            difference = reference_logprobs - logprobs
            kld = np.einsum("tv,tv->t", weights, difference)
        if np.isnan(kld).any():
            # A token with probability 0 by the reference contributes 0. One with probability 0 only by the model makes
            # the divergence infinite.
            difference[weights == 0] = 0
            kld = np.einsum("tv,tv->t", weights, difference)
        # The divergence is never negative, but rounding can make it so for nearly equal rows.
        kld = np.maximum(kld, 0)
        # argmax of the logits, because different logits can round to equal log-probabilities.
        top, reference_top = logits[rows].argmax(axis=1), reference[rows].argmax(axis=1)
        parts.append(
            Divergences(
                kld=kld,
                logprob=_select(logprobs, next_tokens),
                reference_logprob=_select(reference_logprobs, next_tokens),
                top=top,
                top_logprob=_select(logprobs, top),
                reference_top=reference_top,
                reference_top_logprob=_select(reference_logprobs, reference_top),
            )
        )
    return Divergences.joined(parts)


def _blocks(logits: npt.NDArray[np.float32]) -> Iterator[slice]:
    """Splits the rows into blocks of at most `BLOCK_ELEMENTS` logits, at least one row each."""
    rows, vocab = logits.shape
    count = max(1, BLOCK_ELEMENTS // vocab)
    return (slice(first, min(first + count, rows)) for first in range(0, rows, count))


def _log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    highest = logits.max(axis=1, keepdims=True)
    # A model may mask some tokens with negative infinity, but not all of them.
    if not np.isfinite(highest).all():
        raise EngineError("the model's logits are not finite (NaN or infinity)")
    shifted = logits.astype(np.float64) - highest
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _select(rows: Floats, columns: Ids) -> Floats:
    """Returns the element of each row at its column."""
    return rows[np.arange(len(columns)), columns]
