"""Plot of a comparison: the distribution of the divergence over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ferrule._evaluation.compare import Comparison
from ferrule._plotting import new_figure

LOWEST = 1e-9
"""Lower end of the logarithmic axis, in nats; smaller values, such as 0, are drawn here."""


def plot(comparison: Comparison, title: str, path: Path) -> None:
    """Draws the share of tokens whose divergence is at least x, with lines at the mean and several quantiles.

    Raises InvalidParameterError, OSError.
    """
    figure = new_figure()
    axes: Any = figure.subplots()
    kld = comparison.kld
    finite = comparison.token_kld[np.isfinite(comparison.token_kld)]
    values = np.sort(np.maximum(finite, LOWEST))
    # Infinite values count in the shares, but lie to the right of the drawn range.
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
        ylabel="share of tokens with at least this divergence",
        title=title,
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path)
