#!/usr/bin/env python3
"""Draw the benchmark chart of README.md from a record of benches/peers/compare.py.

Usage: chart.py [OUTPUT]. The default OUTPUT is docs/pictures/benchmark.png. The file's metadata has the record's path
and the figures that are drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RECORD = "benches/record/2026-11-21-intel-avx512vnni/peers-avx512vnni.json"
OUTPUT = ROOT / "docs" / "pictures" / "benchmark.png"
OURS, PEER = "#c2410c", "#64748b"
PANELS = (
    ("prefill_tokens_per_second", "Prefill (prompt of 512 tokens)"),
    ("decode_tokens_per_second", "Decode (64 tokens)"),
)


def figures() -> dict[str, dict[str, float]]:
    """Tokens per second of each contender in the record, by the record's field."""
    record = json.loads((ROOT / RECORD).read_text())
    return {
        each["contender"].replace("-avx512", "").replace(":", " "): {field: each[field] for field, _ in PANELS}
        for each in record["contenders"]
    }


def draw(output: Path) -> None:
    """Draws one panel of bars for prefill and one for decode."""
    contenders = figures()
    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for place, (field, title) in enumerate(PANELS, 1):
        axes = figure.add_subplot(1, 2, place)
        values = [each[field] for each in contenders.values()]
        colours = [OURS if name.startswith("ferrule") else PEER for name in contenders]
        bars = axes.barh(list(contenders), values, color=colours)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=4)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("tokens per second")
        axes.set_xlim(0, max(values) * 1.12)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        if place > 1:
            axes.set_yticklabels([])
    figure.suptitle("Llama, 1.24 billion weights, 2 threads of an Intel Xeon (AVX512-VNNI)", fontsize=12)
    figure.savefig(output, metadata={"Source": RECORD, "Comment": json.dumps(contenders)})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
