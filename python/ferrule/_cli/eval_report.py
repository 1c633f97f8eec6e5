"""Results of `ferrule eval`, as a record for programs and as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from ferrule._api.info import size_text
from ferrule._bench.report import console
from ferrule._evaluation import Comparison, Perplexity

Record = dict[str, Any]

NUMBERS = ("KLD", "context", "p", "reference")
"""Right-aligned columns in the table of the worst tokens. The context is one of them, because the token follows it."""
KLD = {
    "mean": "mean",
    "median": "median",
    "p90": "90 %",
    "p99": "99 %",
    "p999": "99.9 %",
    "max": "maximum",
}


def record(facts: Mapping[str, Any], result: Any) -> Record:
    """Returns facts and results as one record; numbers that JSON cannot express are None."""
    match result:
        case Perplexity():
            made = {**facts, **_perplexity(result)}
        case Comparison():
            fields = ("perplexity_ratio", "perplexity_ratio_error", "kld", "same_top", "same_top_error", "worst")
            made = {
                **facts,
                **_perplexity(result.model),
                "reference": {**facts["reference"], **_perplexity(result.reference)},
                **{name: getattr(result, name) for name in fields},
            }
        case _:
            made = {**facts, "tasks": result}
    return _finite(made)


def formats_record(
    workload: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]
) -> Record:
    """Returns the record of several formats; the first of `rows` is the reference's."""
    fields = ("perplexity_ratio", "perplexity_ratio_error", "kld", "same_top", "same_top_error")
    formats = [
        {**row, **_perplexity(found.model), **{name: getattr(found, name) for name in fields}}
        for row, found in zip(rows[1:], comparisons, strict=True)
    ]
    return _finite({**workload, "reference": {**rows[0], **_perplexity(comparisons[0].reference)}, "formats": formats})


def show_formats(made: Record) -> None:
    """Prints a table of the reference and the formats."""
    from rich.table import Table

    out = console()
    reference = made["reference"]
    out.print(f"reference: {_heading(reference)}, {reference['threads']} threads\n", markup=False)
    table = Table(box=None, header_style="dim", pad_edge=False)
    titles = ("format", "size", "bits", "prefill", "decode", "KLD", "±", "99 %", "same top", "perplexity")
    for title in titles:
        table.add_column(title, justify="left" if title == "format" else "right", no_wrap=title != "format")
    for row in (reference, *made["formats"]):
        table.add_row(*map(_escaped, _format_cells(row)))
    out.print(table)
    tokens = f"prefill of {reference['prefill_tokens']} tokens, decode of {reference['decode_tokens']}"
    units = f"{tokens}, in tokens/s, median of {made['repeat']} runs; KLD in nats per token"
    out.print(f"\n{units}\n{_windows(reference)}", style="dim", markup=False)


def _format_cells(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the cells of a format or of the reference, which has no divergence."""
    yield str(row["name"])
    yield size_text(row["weight_bytes"])
    yield f"{row['bits_per_weight']:.2f}"
    for part in ("prefill", "decode"):
        yield _speed(row[f"{part}_tokens_per_second"])
    if (kld := row.get("kld")) is None:
        yield from ("", "", "", "")
    else:
        yield _number(kld["mean"])
        yield "" if kld["error"] is None else f"{kld['error']:.1g}"
        yield _number(kld["p99"])
        yield f"{row['same_top']:.1%}"
    yield _number(row["perplexity"])


def show_perplexity(made: Record) -> None:
    """Prints a model's perplexity."""
    out = console()
    out.print(_heading(made), markup=False)
    out.print(f"perplexity  {_with_error(made, 'perplexity')}", markup=False)
    out.print(_windows(made), style="dim", markup=False)


def show_comparison(made: Record) -> None:
    """Prints the comparison of a model with its reference."""
    out = console()
    reference = made["reference"]
    out.print(_heading(made), markup=False)
    out.print(f"reference: {_heading(reference)}\n", markup=False)
    kld = made["kld"]
    error = "" if kld["error"] is None else f" ± {kld['error']:.2g}"
    lines = {
        "perplexity": _with_error(made, "perplexity"),
        "reference perplexity": _with_error(reference, "perplexity"),
        "perplexity ratio": _with_error(made, "perplexity_ratio"),
        "same top token": f"{made['same_top']:.2%}"
        + ("" if made["same_top_error"] is None else f" ± {made['same_top_error']:.2%}"),
        "divergence (KLD, nats)": f"{_number(kld['mean'])}{error}",
        **{f"  {name}": _number(kld[field]) for field, name in KLD.items() if field != "mean"},
    }
    for name, text in lines.items():
        out.print(f"{name:24}{text}", markup=False)
    out.print(_windows(made), style="dim", markup=False)
    if made["worst"]:
        _show_worst(made["worst"])


def show_tasks(made: Record) -> None:
    """Prints the metrics of each task."""
    from rich.table import Table

    out = console()
    out.print(_heading(made), markup=False)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("task", "shots", "metric", "value", "±"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right", no_wrap=True)
    for task, figures in made["tasks"].items():
        for metric, value in figures["metrics"].items():
            error = figures["errors"].get(metric)
            cells = (task, str(figures["shots"]), metric, _number(value), "" if error is None else f"{error:.2g}")
            table.add_row(*map(_escaped, cells))
    out.print(table)


def _show_worst(worst: list[Record]) -> None:
    from rich.table import Table

    out = console()
    out.print()
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("KLD", "context", "token", "p", "reference", "top", "reference's top"):
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for token in worst:
        top, reference_top = token["top"], token["reference_top"]
        cells = (
            _number(token["kld"]),
            _tail(token["context"], 30),
            repr(token["token"]),
            f"{token['probability']:.2g}",
            f"{token['reference_probability']:.2g}",
            f"{top['text']!r} {top['probability']:.2g}",
            f"{reference_top['text']!r} {reference_top['probability']:.2g}",
        )
        table.add_row(*map(_escaped, cells))
    out.print(table)


def _perplexity(result: Perplexity) -> Record:
    fields = asdict(result)
    return {**fields.pop("windowing"), **fields}


def _heading(made: Mapping[str, Any]) -> str:
    return f"{made['model']}  {made['quantization']} weights, {made['kv_cache_dtype']} cache, {made['isa']}"


def _windows(made: Mapping[str, Any]) -> str:
    context = f" with at least {made['min_context']} preceding tokens" if made["min_context"] else ""
    windows = "1 window" if made["windows"] == 1 else f"{made['windows']} windows"
    return f"{made['tokens']:,} tokens scored{context}, in {windows} of {made['window']}, stride {made['stride']}"


def _with_error(made: Mapping[str, Any], name: str) -> str:
    error = made[f"{name}_error"]
    return _number(made[name]) + ("" if error is None else f" ± {error:.2g}")


def _number(value: float | None) -> str:
    if value is None:
        return "infinite"
    return f"{value:.4f}" if value >= 1 else f"{value:.4g}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _tail(text: str, characters: int) -> str:
    """Returns the end of a text as one line of at most `characters`."""
    line = repr(text)[1:-1]
    return line if len(line) <= characters else f"...{line[-characters + 3 :]}"


def _finite(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _finite(asdict(value))
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
