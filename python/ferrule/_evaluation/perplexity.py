"""Perplexity: the exponential of the mean negative log-probability of the tokens of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ferrule._evaluation.divergence import Floats, token_logprobs
from ferrule._evaluation.subject import Subject
from ferrule._evaluation.windows import TextOrTokens, Window, Windowing, cut, read_texts
from ferrule._params.sampling import MAX_COUNT
from ferrule._validation import check_integer
from ferrule.errors import PromptError

Progress = Callable[[int, int], None]
"""Callback with the number of finished windows and the total number of windows."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a model on texts."""

    perplexity: float
    perplexity_error: float
    """Standard error of the perplexity to first order: perplexity x nll_error."""
    nll: float
    """Mean negative log-probability of a token, in nats."""
    nll_error: float
    """Standard error of `nll`, assuming independent tokens; NaN for a single token."""
    tokens: int
    """Number of scored tokens."""
    windows: int
    windowing: Windowing

    @classmethod
    def of(cls, logprobs: Floats, windows: int, windowing: Windowing) -> Perplexity:
        """Summarizes the log-probabilities of the scored tokens."""
        nll, error = mean_and_error(-logprobs)
        value = exp(nll)
        return cls(value, value * error, nll, error, len(logprobs), windows, windowing)


def perplexity(
    subject: Subject,
    texts: TextOrTokens | Sequence[TextOrTokens],
    *,
    window: int | None,
    stride: int | None,
    min_context: int,
    limit: int | None,
    progress: Progress | None,
) -> Perplexity:
    """Implements `LLM.perplexity`."""
    windowing = Windowing.of(window, stride, min_context, subject.max_model_len)
    windows = windows_of(subject, texts, windowing, limit)
    logprobs: list[Floats] = []
    for done, each in enumerate(windows):
        report(progress, done, windows)
        logprobs.append(token_logprobs(logits_before(subject, each), np.array(each.targets)))
    report(progress, len(windows), windows)
    return Perplexity.of(np.concatenate(logprobs), len(windows), windowing)


def windows_of(
    subject: Subject, texts: TextOrTokens | Sequence[TextOrTokens], windowing: Windowing, limit: int | None
) -> list[Window]:
    """Returns the windows to evaluate: at least one, at most `limit`.

    Raises PromptError, TokenizerError, InvalidParameterError.
    """
    limit = None if limit is None else check_integer("limit", limit, 1, MAX_COUNT)
    windows = list(cut(read_texts(subject, texts), windowing))
    if not windows:
        most = f"{windowing.min_context} tokens before it" if windowing.min_context else "a token before it"
        raise PromptError(f"texts must have a token with {most}; give a longer text", field="texts")
    return windows[:limit]


def logits_before(subject: Subject, window: Window) -> npt.NDArray[np.float32]:
    """Computes the logits `[targets, vocab]` that predict each scored token."""
    return subject.logits(window.token_ids[:-1], window.first - 1)


def report(progress: Progress | None, done: int, windows: Sequence[Window]) -> None:
    """Calls the progress callback, if there is one."""
    if progress is not None:
        progress(done, len(windows))


def mean_and_error(values: Floats) -> tuple[float, float]:
    """Returns the mean and its standard error, assuming independent values; the error of a single value is NaN."""
    mean, count = float(values.mean()), len(values)
    if count < 2 or not math.isfinite(mean):
        return mean, math.nan
    return mean, float(values.std(ddof=1)) / math.sqrt(count)


def exp(nll: float) -> float:
    """Returns the exponential; infinity if it is too large for a float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
