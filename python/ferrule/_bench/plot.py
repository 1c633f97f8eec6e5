"""Roofline plot of a record (Williams, Waterman and Patterson 2009).

A computation with `x` operations for each byte that it reads reaches at most `min(peak, x * bandwidth)` operations per
second. To the left of the ridge, memory bandwidth is the limit; to the right of it, arithmetic is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule._bench.record import Record
from ferrule._plotting import new_figure


def plot(record: Record, path: Path) -> None:
    """Draws the points of a model's record under the roofline.

    Raises InvalidParameterError, OSError.
    """
    figure = new_figure()
    axes: Any = figure.subplots()
    marks = list(_marks(record))
    read = 1e9 * record["read_gbps"]
    roofs = {"int8": 1e9 * record["int8_gops"], "f32": 1e9 * record["f32_gflops"]}
    low = min(mark.intensity for mark in marks) / 2
    high = max(*(mark.intensity for mark in marks), *(peak / read for peak in roofs.values())) * 4
    for (name, peak), color in zip(roofs.items(), ("tab:blue", "tab:gray"), strict=True):
        ridge = peak / read
        axes.plot([low, ridge, high], [low * read, peak, peak], color=color, label=f"{name} peak, {peak / 1e9:.0f} G/s")
    for phase, shape, color in (("decode", "o", "tab:orange"), ("prefill", "s", "tab:green")):
        drawn = [mark for mark in marks if mark.phase == phase]
        axes.plot([mark.intensity for mark in drawn], [mark.speed for mark in drawn], shape, color=color, label=phase)
        for mark in drawn:
            place = (mark.intensity, mark.speed)
            axes.annotate(mark.label, place, xytext=(6, -3), textcoords="offset points", fontsize=7, va="top")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte that must be read",
        ylabel="operations per second",
        title=f"{record['model']}, {record['format']}: {record['isa']}, {record['threads']} threads, "
        f"read bandwidth {read / 1e9:.1f} GB/s",
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


@dataclass(frozen=True)
class Mark:
    """Throughput of prefill or decode at a point.

    As in the fractions of the record, only the operations of the layers' projections count, without attention and
    lm_head. The ratio of a decode mark to the sloped line below the ridge is therefore its fraction of the bandwidth.
    """

    phase: str
    label: str
    """Number of prompt tokens, preceded by the number of sequences if there are several."""
    intensity: float
    """Operations per byte that must be read."""
    speed: float
    """Operations per second."""


def _marks(record: Record) -> Iterator[Mark]:
    weights, layers = record["weight_bytes_per_token"], record["layer_parameters_per_token"]
    prompts: set[int] = set()
    for point in record.get("points", [record]):
        tokens, batch = point["prefill_tokens"], point["batch"]
        operations = 2 * layers * batch
        label = f"{tokens}" if batch == 1 else f"{batch} x {tokens}"
        yield Mark("decode", label, operations / point["decode_step_bytes"], operations / point["decode_step_seconds"])
        if tokens not in prompts:  # the prefill speed does not depend on the batch size
            prompts.add(tokens)
            # Prefill reads the weights at least once.
            yield Mark(
                "prefill", f"{tokens}", 2 * layers * tokens / weights, 2 * layers * point["prefill_tokens_per_second"]
            )
