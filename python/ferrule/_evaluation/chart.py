"""Chart of several formats of a model: divergence over size, and a table of their figures, as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ferrule._pictures import BACKGROUND, HIGHLIGHT, LINE, MUTED, TEXT, opening, text_at

WIDTH = 800
LEFT, RIGHT, TOP, BOTTOM = 90, 760, 110, 380
"""Edges of the area of the points, in pixels."""
ROW = 26
"""Height of a line of the table, in pixels."""
LOWEST = 1e-6
"""Lower end of the logarithmic axis, in nats; smaller values, such as 0, are drawn here."""
COLORS = ("#e3b45c", "#7fb3d5", "#8fc98b", "#e08e79", "#b39ddb", "#d98cb3", "#7ccfc4", "#c2c26b")
COLUMNS = (300, 375, 455, 535, 610, 685, 760)
"""Right edges of the columns of the table after the name, in pixels."""
TITLES = ("size, MB", "bits", "prefill", "decode", "KLD", "same top", "perplexity")

_text = partial(text_at, most=90)


def chart(record: Mapping[str, Any], machine: str) -> str:
    """Returns the picture of a record of `ferrule eval --compare`; infinite divergences have no point."""
    reference, formats = record["reference"], record["formats"]
    rows = [reference, *formats]
    height = BOTTOM + 90 + ROW * (len(rows) + 1)
    parts = [
        opening(WIDTH, height, _summary(record)),
        _text(40, 50, 24, TEXT, _name(reference), weight=700),
        _text(40, 76, 14, MUTED, f"divergence from {reference['name']}, {reference['tokens']:,} tokens"),
        _text(40, 96, 14, MUTED, f"{machine}, {reference['isa']}, {reference['threads']} threads"),
        *_axes(formats),
        *_points(formats),
        *_table(rows, BOTTOM + 70),
        _text(40, height - 20, 12, MUTED, "prefill and decode in tokens per second, KLD in nats per token"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _axes(formats: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    low, high = _decades(formats)
    for power in range(low, high + 1):
        y = _y(10.0**power, low, high)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{LINE}"/>'
        yield _text(LEFT - 8, y + 4, 12, MUTED, f"{10.0**power:g}", anchor="end")
    step = _tick(_largest(formats))
    for count in range(int(_largest(formats) / step) + 1):
        x = _x(count * step, formats)
        yield f'<path d="M{x:.1f} {BOTTOM}v6" stroke="{MUTED}"/>'
        yield _text(x, BOTTOM + 20, 12, MUTED, f"{count * step / 1e6:g}", anchor="middle")
    yield _text(LEFT, TOP - 2 + 16, 12, MUTED, "mean KL divergence, nats (lower is better)")
    yield _text(RIGHT, BOTTOM + 38, 12, MUTED, "size of the weights, MB", anchor="end")


def _points(formats: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    low, high = _decades(formats)
    for number, each in enumerate(formats):
        if each["kld"]["mean"] is not None:
            x, y = _x(each["weight_bytes"], formats), _y(each["kld"]["mean"], low, high)
            yield from _mark(x, y, number)


def _mark(x: float, y: float, number: int) -> Iterator[str]:
    """Draws the number of a format in a circle, from 1."""
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{COLORS[number % len(COLORS)]}"/>'
    yield _text(round(x, 1), round(y + 4, 1), 11, BACKGROUND, str(number + 1), weight=700, anchor="middle")


def _table(rows: Sequence[Mapping[str, Any]], top: float) -> Iterator[str]:
    for right, title in zip(COLUMNS, TITLES, strict=True):
        yield _text(right, top, 12, MUTED, title, anchor="end")
    for line, row in enumerate(rows, start=1):
        y = top + ROW * line
        if line > 1:
            yield from _mark(49, y - 5, line - 2)
        color = MUTED if line == 1 else TEXT
        yield text_at(66, y, 13, color, str(row["name"]), most=22, weight=600)
        for right, text in zip(COLUMNS, _cells(row), strict=True):
            yield _text(right, y, 13, HIGHLIGHT if right == COLUMNS[4] else color, text, anchor="end")


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{row['weight_bytes'] / 1e6:,.1f}"
    yield f"{row['bits_per_weight']:.2f}"
    for part in ("prefill", "decode"):
        yield f"{row[f'{part}_tokens_per_second']:,.0f}"
    if "kld" in row:
        yield "infinite" if row["kld"]["mean"] is None else f"{row['kld']['mean']:.3g}"
        yield f"{row['same_top']:.1%}"
    else:
        yield from ("", "")
    yield "infinite" if row["perplexity"] is None else f"{row['perplexity']:.4g}"


def _decades(formats: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Returns the powers of ten that enclose the divergences, at least one decade."""
    found = [max(each["kld"]["mean"], LOWEST) for each in formats if each["kld"]["mean"] is not None] or [1.0]
    low = math.floor(math.log10(min(found)))
    return low, max(math.ceil(math.log10(max(found))), low + 1)


def _largest(formats: Sequence[Mapping[str, Any]]) -> int:
    return max(each["weight_bytes"] for each in formats)


def _tick(largest: int) -> float:
    """Returns the distance of the ticks: 1, 2 or 5 times a power of ten, with 4 to 10 ticks."""
    power = 10.0 ** math.floor(math.log10(largest / 4))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= largest / 4)


def _x(size: float, formats: Sequence[Mapping[str, Any]]) -> float:
    return LEFT + (RIGHT - LEFT - 20) * size / _largest(formats)


def _y(kld: float, low: int, high: int) -> float:
    return BOTTOM - (BOTTOM - TOP - 25) * (math.log10(max(kld, LOWEST)) - low) / (high - low)


def _name(reference: Mapping[str, Any]) -> str:
    """Returns the last part of the model's name or path."""
    return str(reference["model"]).rstrip("/").rsplit("/", 1)[-1]


def _summary(record: Mapping[str, Any]) -> str:
    described = [
        f"{each['name']} {each['weight_bytes'] / 1e6:.1f} MB, KL divergence "
        + ("infinite" if each["kld"]["mean"] is None else f"{each['kld']['mean']:.3g}")
        for each in record["formats"]
    ]
    return f"Formats of {_name(record['reference'])}: {'; '.join(described)}"
