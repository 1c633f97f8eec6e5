"""A card of a model's record to share: machine, model, speeds and their share of the limits, as an SVG picture."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ferrule
from ferrule._bench.record import FLOAT_FORMATS, Record
from ferrule._pictures import HIGHLIGHT, LINE, MUTED, TEXT, opening, text_at

WIDTH, HEIGHT = 800, 400
MAX_CHARACTERS = 46
"""Maximum length of a name that fits the width of the card."""

_text = partial(text_at, most=MAX_CHARACTERS)


def card(record: Record, machine: str) -> str:
    """Returns the text of the card; a record of several points is represented by the first."""
    is_float = record["format"] in FLOAT_FORMATS
    peak = record["f32_gflops"] if is_float else record["int8_gops"]
    prefill_share = record["prefill_f32_fraction" if is_float else "prefill_peak_fraction"]
    sequences = "" if record["batch"] == 1 else f", {record['batch']} sequences"
    decode = f"after {record['prefill_tokens']} tokens{sequences}"
    parts = [
        opening(WIDTH, HEIGHT, _summary(record, machine)),
        _text(40, 62, 28, TEXT, str(record["model"]), weight=700),
        _text(40, 92, 17, MUTED, f"{record['format']} weights, {_threads(record)}, {record['isa']}"),
        _text(40, 118, 17, MUTED, machine),
        *_speed(
            150,
            ("Decode", decode),
            record["decode_tokens_per_second"],
            record["decode_bandwidth_fraction"],
            f"of the read bandwidth, {record['read_gbps']:.1f} GB/s",
        ),
        *_speed(
            255,
            ("Prefill", f"{record['prefill_tokens']} tokens{sequences}"),
            record["prefill_tokens_per_second"],
            prefill_share,
            f"of the peak, {peak:.0f} {'GFLOPS' if is_float else 'GOPS'}",
        ),
        _text(40, 374, 15, MUTED, f"ferrule {ferrule.__version__} · ferrule bench --card"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def machine_name() -> str:
    """Returns the name of the processor, or of its architecture where the system does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _speed(top: int, labels: tuple[str, str], speed: float, share: float, limit: str) -> Iterator[str]:
    """Returns a speed with its name and condition, and a bar of its share of the limit."""
    name, condition = labels
    bar = WIDTH - 80
    filled = bar * min(1.0, max(0.0, share))
    yield _text(40, top + 34, 38, HIGHLIGHT, f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}", weight=700)
    yield _text(205, top + 20, 17, TEXT, f"{name}, tokens/s", weight=600)
    yield _text(205, top + 40, 15, MUTED, condition)
    yield f'<rect x="40" y="{top + 52}" width="{bar}" height="10" rx="5" fill="{LINE}"/>'
    yield f'<rect x="40" y="{top + 52}" width="{filled:.1f}" height="10" rx="5" fill="{HIGHLIGHT}"/>'
    yield _text(WIDTH - 40, top + 40, 15, MUTED, f"{share:.0%} {limit}", anchor="end")


def _summary(record: Record, machine: str) -> str:
    speeds = [f"{part} {record[f'{part}_tokens_per_second']:.1f} tokens/s" for part in ("decode", "prefill")]
    return f"{record['model']} on {machine}: {', '.join(speeds)}"


def _threads(record: Record) -> str:
    return "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
