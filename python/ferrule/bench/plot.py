"""A picture of a record: what was achieved against the roofline, after Williams, Waterman and Patterson (2009).

Left of the ridge the memory limits a computation, right of it the arithmetic: what does `x` operations for each byte
that it must read can do at most `min(peak, x * bandwidth)` operations per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ferrule.bench.record import Record
from ferrule.errors import InvalidParameterError


def check_plot(path: Path) -> None:
    """Whether a picture can be drawn and written there, before anything is measured for it.

    Raises InvalidParameterError.
    """
    if path.suffix.lower() != ".png":
        raise InvalidParameterError(f"--plot {path}: the name must end in .png")
    if not path.parent.is_dir():
        raise InvalidParameterError(f"--plot {path}: no folder {path.parent}")
    _figures()


def plot(record: Record, path: Path) -> None:
    """Draws the points of a model's record under its roofs.

    Raises InvalidParameterError, OSError.
    """
    # Without pyplot nothing looks for a display.
    figure: Any = _figures().Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes: Any = figure.subplots()
    achieved = list(_achieved(record))
    read = 1e9 * record["read_gbps"]
    roofs = {"int8": 1e9 * record["int8_gops"], "f32": 1e9 * record["f32_gflops"]}
    low = min(intensity for _, intensity, _ in achieved) / 4
    high = max(*(intensity for _, intensity, _ in achieved), max(roofs.values()) / read) * 4
    for (name, peak), color in zip(roofs.items(), ("tab:blue", "tab:gray"), strict=True):
        ridge = peak / read
        axes.plot([low, ridge, high], [low * read, peak, peak], color=color, label=f"{name} peak, {peak / 1e9:.0f} G/s")
    for name, intensity, speed in achieved:
        marker = "o" if name.startswith("decode") else "s"
        axes.plot([intensity], [speed], marker, color="tab:orange" if marker == "o" else "tab:green", markersize=5)
        axes.annotate(name, (intensity, speed), xytext=(6, -3), textcoords="offset points", fontsize=7, va="top")
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


def _achieved(record: Record) -> Iterator[tuple[str, float, float]]:
    """Each phase of each point: its name, operations per byte, operations per second.

    Operations are those of the layers' projections, as in the record's fractions: no attention, no head. The height of
    a decode's mark over its place on the slope is thus its fraction of the bandwidth.
    """
    weights, layers = record["weight_bytes_per_token"], record["layer_parameters"]
    for point in record.get("points", [record]):
        where = f"{point['prefill_tokens']} tokens" + (f" x {point['batch']}" if point["batch"] > 1 else "")
        operations = 2 * layers * point["batch"]
        yield f"decode, {where}", operations / point["decode_step_bytes"], operations / point["decode_step_seconds"]
        # A prompt reads the weights once at the least.
        operations = 2 * layers * point["prefill_tokens"]
        yield f"prefill, {where}", operations / weights, 2 * layers * point["prefill_tokens_per_second"]


def _figures() -> ModuleType:
    """The figures of matplotlib.

    Raises InvalidParameterError where it is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise InvalidParameterError("--plot needs matplotlib: pip install 'ferrule[plot]'") from error
    return matplotlib.figure
