"""A picture of a comparison: how many tokens diverge by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ferrule._evaluation.compare import Comparison
from ferrule._plotting import new_figure

LOWEST = 1e-9
"""Nats; what is less is drawn here, since a logarithm has no place for nothing."""


def plot(comparison: Comparison, title: str, path: Path) -> None:
    """Draws which share of the tokens has at least a divergence, over that divergence, with its mean and its tail.

    Raises InvalidParameterError, OSError.
    """
    figure = new_figure()
    axes: Any = figure.subplots()
    kld = comparison.kld
    finite = comparison.token_kld[np.isfinite(comparison.token_kld)]
    values = np.sort(np.maximum(finite, LOWEST))
    # Infinite ones are to the right of all that is drawn.
    shares = (len(comparison.token_kld) - np.arange(len(values))) / len(comparison.token_kld)
    axes.step(values, shares, where="pre", color="tab:blue")
    marks = {"median": kld.median, "mean": kld.mean, "99 %": kld.p99, "99.9 %": kld.p999, "maximum": kld.max}
    for number, (name, value) in enumerate(marks.items()):
        if np.isfinite(value):
            axes.axvline(max(value, LOWEST), color=f"C{number + 1}", linestyle="--", label=f"{name}, {value:.3g}")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="Kullback-Leibler divergence from the reference, nats",
        ylabel="share of tokens with at least this",
        title=title,
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path)
