"""`ferrule info`: what a model is and what it needs here."""

from __future__ import annotations

import json
from typing import Any, cast

import click

from ferrule.cli.model import load, model_argument, model_options, prefix_cache_option


@click.command("info")
@model_argument
@model_options
@prefix_cache_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, as_json: bool, **loading: Any) -> None:
    """Show what MODEL is, how it is loaded, and what it needs in memory."""
    with load(model, loading) as llm:
        info = llm.info()
    if as_json:
        print(json.dumps(info))
        return
    width = max(map(len, info))
    for name, value in info.items():
        print(f"{name.replace('_', ' '):{width}}  {_shown(name, value)}")


def _shown(name: str, value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if "bytes" in name:
            return f"{value:,} ({_size(value)})"
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(_shown("", entry) for entry in cast("list[object]", value))
        case dict():
            fields = cast("dict[str, object]", value).items()
            return " ".join(f"{name.replace('_', ' ')} {_shown(name, of)}" for name, of in fields)
        case _:
            return "none" if value is None else str(value)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
