"""Tables of records, for a terminal of 80 columns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrule._bench.compare import Comparison
from ferrule._bench.record import FLOAT_FORMATS, Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CEILINGS = {
    "read_gbps": ("read bandwidth", "GB/s"),
    "int8_gops": ("int8 peak", "GOPS"),
    "f32_gflops": ("f32 peak", "GFLOPS"),
    "add_probe": ("integer additions", "G/s"),
}


def console() -> Console:
    """Creates a console without highlighting; 100 columns wide if stdout is not a terminal."""
    from rich.console import Console

    terminal = Console(highlight=False, soft_wrap=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=100)


def show_model(record: Record) -> None:
    """Prints a model's record."""
    out = console()
    points: list[Record] = record.get("points", [record])
    peak, peak_unit, fraction = _peak(record)
    _print_heading(out, record)
    out.print(_points(points, fraction))
    ceilings = {name: statistics.median(point[name] for point in points) for name in CEILINGS}
    legend = _table("", "", header=False)
    legend.columns[1].justify, legend.columns[1].no_wrap = "left", False
    read = f"{_rounded(ceilings['read_gbps'])} GB/s"
    memory = "KV cache, reading and writing states" if record["state_bytes"] else "KV cache"
    for name, meaning in (
        ("of peak", f"speed of the layers' matmuls / {CEILINGS[peak][0]}, {_rounded(ceilings[peak])} {peak_unit}"),
        ("of read", f"speed of reading weights and {memory} / read bandwidth, {read}"),
        ("x read", "time of a step / time of reading only its weights"),
        ("p50-max", "time between consecutive tokens of a sequence"),
    ):
        legend.add_row(name, meaning)
    out.print()
    out.print(legend, style="dim")
    _print_energy(out, points)
    repeated, bad = (sum(point[name] for point in points) for name in ("runs_repeated", "runs_in_bad_windows"))
    if repeated:
        verdict = f"; {bad} of the reported runs were disturbed too" if bad else ""
        out.print(f"{repeated} {_runs(repeated)} repeated because other processes used the CPUs{verdict}.")


def show_machine(record: Record) -> None:
    """Prints the machine's record."""
    out = console()
    threads, one = record["threads"], record["one_thread"]
    rounds = "round" if record["repeat"] == 1 else "rounds"
    out.print(f"[bold]This machine[/bold]  {record['isa']}, median of {record['repeat']} {rounds}\n")
    table = _table("", "unit", "1 thread", *([f"{threads} threads", "scaling"] if threads > 1 else []))
    table.columns[1].justify = "left"
    for figure, (name, unit) in CEILINGS.items():
        several = [_rounded(record[figure]), f"{record['scaling'][figure]:.2f}"] if threads > 1 else []
        table.add_row(name, unit, _rounded(one[figure]), *several)
    out.print(table)
    out.print(
        f"\nThe read bandwidth was measured on {record['read_probe_bytes'] / 2**20:.0f} MiB of memory.", style="dim"
    )
    if bad := record["rounds_in_bad_windows"]:
        out.print(f"{bad} {'round' if bad == 1 else 'rounds'} discarded because other processes used the CPUs.")


def show_card_hint() -> None:
    """Prints which option draws a card."""
    console().print("\n--card FILE.svg draws these speeds on a card to share.", style="dim")


def show_comparison(comparison: Comparison, name: str) -> None:
    """Prints the changes since the record `name`."""
    out = console()
    out.print(f"\n[bold]Compared with[/bold]  {_escaped(name)}")
    for condition, (old, new) in comparison.differs.items():
        out.print(f"{condition} differs: {_escaped(str(old))} (old), {_escaped(str(new))} (new)", style="yellow")
    several = any(change.point for change in comparison.changes)
    table = _table(*(["point"] if several else []), "figure", "old", "new", "ratio")
    for column in table.columns[: 2 if several else 1]:
        column.justify = "left"
    last = ""
    for change in comparison.changes:
        point = [] if not several else ["" if change.point == last else change.point]
        last = change.point
        figure = change.figure.replace("_", " ")
        table.add_row(*point, figure, _rounded(change.old), _rounded(change.new), f"{change.ratio:.3f}")
    out.print(table)


def _print_heading(out: Console, record: Record) -> None:
    parts = [
        f"{record['format']} weights",
        f"{record['kv_cache_dtype']} cache",
        str(record["isa"]),
        "1 thread" if record["threads"] == 1 else f"{record['threads']} threads",
        f"median of {record['repeat']} {_runs(record['repeat'])}",
    ]
    out.print(f"[bold]{_escaped(str(record['model']))}[/bold]  {', '.join(parts)}\n")


def _points(points: Sequence[Record], fraction: str) -> Table:
    table = _table(
        "prompt\ntokens",
        "batch\n",
        "prefill\ntok/s",
        "of\npeak",
        "decode\ntok/s",
        "of\nread",
        "step\nms",
        "x\nread",
        "p50\nms",
        "p90\nms",
        "p99\nms",
        "max\nms",
    )
    table.columns[0].justify = "right"
    for point in points:
        latencies = [point[f"inter_token_latency_{name}"] for name in ("p50", "p90", "p99", "max")]
        table.add_row(
            str(point["prefill_tokens"]),
            str(point["batch"]),
            _rounded(point["prefill_tokens_per_second"]),
            f"{point[fraction]:.0%}",
            _rounded(point["decode_tokens_per_second"]),
            f"{point['decode_bandwidth_fraction']:.0%}",
            _rounded(1e3 * point["decode_step_seconds"]),
            f"{point['decode_step_over_weight_read']:.2f}",
            *(_rounded(1e3 * latency) for latency in latencies),
        )
    return table


def _print_energy(out: Console, points: Sequence[Record]) -> None:
    """Prints the energy of the points for which it was measured."""
    for point in points:
        figures = {part: point.get(f"{part}_joules_per_token") for part in ("prefill", "decode")}
        words = [f"{part} {figure:.3g} J/token" for part, figure in figures.items() if figure is not None]
        if words:
            where = f"{point['batch']} x {point['prefill_tokens']} tokens"
            out.print(f"energy at {where}: {', '.join(words)} (RAPL: processors and memory of the whole machine)")


def _peak(record: Record) -> tuple[str, str, str]:
    """Returns the peak of the format's matmuls: the names of its figure, of its unit and of the fraction's figure."""
    if record["format"] in FLOAT_FORMATS:
        return "f32_gflops", "GFLOPS", "prefill_f32_fraction"
    return "int8_gops", "GOPS", "prefill_peak_fraction"


def _table(*headers: str, header: bool = True) -> Table:
    """Creates a table whose first column is left-aligned and whose other columns are right-aligned."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", show_header=header, pad_edge=False)
    for number, name in enumerate(headers):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _rounded(figure: float) -> str:
    """Formats a number with at least three significant digits."""
    for limit, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(figure) >= limit:
            return f"{figure:.{digits}f}"
    return f"{figure:.3g}"


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
