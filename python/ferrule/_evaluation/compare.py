"""Comparison of models with a reference, such as formats of the same weights, over the same windows.

The result has the figures of llama.cpp's `--kl-divergence`. Memory holds all models, and the logits of one window from
the reference and from one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ferrule._evaluation.divergence import Divergences, Floats, divergences
from ferrule._evaluation.perplexity import (
    Perplexity,
    Progress,
    exp,
    logits_before,
    mean_and_error,
    report,
    windows_of,
)
from ferrule._evaluation.subject import Subject
from ferrule._evaluation.windows import TextOrTokens, Window, Windowing
from ferrule._params.sampling import MAX_COUNT
from ferrule._validation import check_integer

CONTEXT_TOKENS = 16
"""Number of preceding tokens to show for each of the worst tokens."""


@dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence of the model from the reference over all scored tokens, in nats."""

    mean: float
    error: float
    """Standard error of the mean, assuming independent tokens; NaN for a single token."""
    median: float
    p90: float
    """90th percentile over tokens."""
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, kld: Floats) -> Divergence:
        """Summarizes the divergence of each token; a quantile is the lowest observed value that reaches its share."""
        mean, error = mean_and_error(kld)
        # Interpolation would give NaN between two infinite values.
        tail = np.quantile(kld, [0.5, 0.9, 0.99, 0.999, 1], method="inverted_cdf")
        return cls(mean, error, *map(float, tail))


@dataclass(frozen=True)
class LikelyToken:
    """The most likely token of a model, with its probability."""

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True)
class WorstToken:
    """A token of the text where the predictions of the two models differ most."""

    kld: float
    text: int
    """Index of the text."""
    position: int
    """Index of the token within the text."""
    context: str
    """Text of the preceding tokens, at most `CONTEXT_TOKENS`."""
    token_id: int
    token: str
    """Text of the token; U+FFFD if it is part of a character."""
    probability: float
    """Probability of this token by the model."""
    reference_probability: float
    """Probability of this token by the reference."""
    top: LikelyToken
    """Most likely token of the model at this position."""
    reference_top: LikelyToken
    """Most likely token of the reference at this position."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of a model with a reference."""

    model: Perplexity
    reference: Perplexity
    perplexity_ratio: float
    """Perplexity of the model divided by that of the reference."""
    perplexity_ratio_error: float
    """Standard error of the ratio. It is computed from the difference at each token, so it is much smaller than the
    errors of the two perplexities suggest."""
    kld: Divergence
    same_top: float
    """Share of the scored tokens for which both models predict the same most likely token."""
    same_top_error: float
    """Standard error of `same_top`."""
    worst: list[WorstToken]
    """Tokens with the largest divergence, in descending order."""
    token_kld: npt.NDArray[np.float64] = field(repr=False, compare=False)
    """Divergence of the predictions of each scored token, in order: `[tokens]`."""


def compare_each(
    subjects: Sequence[Subject],
    reference: Subject,
    texts: TextOrTokens | Sequence[TextOrTokens],
    *,
    reader: Subject,
    window: int | None,
    stride: int | None,
    min_context: int,
    limit: int | None,
    worst: int,
    progress: Progress | None,
) -> list[Comparison]:
    """Implements `LLM.compare` and `LLM.compare_each`; the tokenizer of `reader` reads the texts."""
    worst = check_integer("worst", worst, 0, MAX_COUNT)
    for subject in subjects:
        subject.check_same_vocabulary(reference)
    shortest = min(each.max_model_len for each in (*subjects, reference))
    windowing = Windowing.of(window, stride, min_context, shortest)
    windows = windows_of(reader, texts, windowing, limit)
    parts: list[list[Divergences]] = [[] for _ in subjects]
    for done, each in enumerate(windows):
        report(progress, done, windows)
        reference_rows, targets = logits_before(reference, each), np.array(each.targets)
        for subject, of_subject in zip(subjects, parts, strict=True):
            of_subject.append(divergences(logits_before(subject, each), reference_rows, targets))
    report(progress, len(windows), windows)
    return [
        _comparison(subject, windows, Divergences.joined(of_subject), windowing, worst)
        for subject, of_subject in zip(subjects, parts, strict=True)
    ]


def _comparison(
    subject: Subject, windows: Sequence[Window], joined: Divergences, windowing: Windowing, worst: int
) -> Comparison:
    nll_difference, difference_error = _difference(joined)
    ratio = exp(nll_difference)
    same_top, same_top_error = mean_and_error((joined.top == joined.reference_top).astype(np.float64))
    return Comparison(
        model=Perplexity.of(joined.logprob, len(windows), windowing),
        reference=Perplexity.of(joined.reference_logprob, len(windows), windowing),
        perplexity_ratio=ratio,
        perplexity_ratio_error=ratio * difference_error,
        kld=Divergence.of(joined.kld),
        same_top=same_top,
        same_top_error=same_top_error,
        worst=list(_worst(subject, windows, joined, worst)),
        token_kld=joined.kld,
    )


def _difference(joined: Divergences) -> tuple[float, float]:
    """Returns the mean difference of the negative log-probabilities, and its standard error."""
    if not (np.isfinite(joined.logprob).all() and np.isfinite(joined.reference_logprob).all()):
        return math.nan, math.nan
    return mean_and_error(joined.reference_logprob - joined.logprob)


def _worst(subject: Subject, windows: Sequence[Window], joined: Divergences, count: int) -> Iterator[WorstToken]:
    """Yields the tokens with the largest divergence in descending order; equal ones in the order of the text."""
    ends = np.cumsum([len(window.targets) for window in windows])
    text_of = subject.tokenizer.token_text

    def likely(token_id: int, logprob: float) -> LikelyToken:
        return LikelyToken(token_id, text_of(token_id), math.exp(logprob))

    largest: list[int] = np.argsort(-joined.kld, kind="stable")[:count].tolist()
    for index in largest:
        window = windows[number := int(np.searchsorted(ends, index, side="right"))]
        offset = index - (0 if number == 0 else int(ends[number - 1]))
        place = window.first + offset
        before = window.token_ids[max(0, place - CONTEXT_TOKENS) : place]
        token_id = window.token_ids[place]
        yield WorstToken(
            kld=float(joined.kld[index]),
            text=window.text,
            position=window.position + offset,
            context=subject.tokenizer.decode(before, skip_special_tokens=False) if subject.tokenizer.available else "",
            token_id=token_id,
            token=text_of(token_id),
            probability=math.exp(joined.logprob[index]),
            reference_probability=math.exp(joined.reference_logprob[index]),
            top=likely(int(joined.top[index]), float(joined.top_logprob[index])),
            reference_top=likely(int(joined.reference_top[index]), float(joined.reference_top_logprob[index])),
        )
