"""`ferrule search`: models with short names."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ferrule._api.info import size_text
from ferrule._cli.help import Command
from ferrule._loading.catalogue import Entry, catalogue, similar_names, user_file
from ferrule._loading.packages import packaged_path

HEADINGS = ("NAME", "SIZE", "LICENSE", "MODEL")


@click.command(
    "search",
    cls=Command,
    examples=[
        ("All models:", "ferrule search"),
        ("Models of a family:", "ferrule search qwen3"),
        ("Use one of them:", "ferrule run smollm2:135m"),
    ],
)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(words: tuple[str, ...], as_json: bool) -> None:
    """List models with short names whose name, title, license or repository contains every WORD.

    Every model of the Hugging Face hub can be used by its name there: ORG/REPO, or ORG/REPO:Q4_K_M for a GGUF file.
    ~/.config/ferrule/models.toml adds names of your own.
    """
    found = [entry for entry in catalogue().values() if all(word.lower() in _text(entry) for word in words)]
    if as_json:
        click.echo(json.dumps({"models": [asdict(entry) for entry in found], "user_file": str(user_file())}))
        return
    if not found:
        near = similar_names(words[0])
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise click.ClickException(
            f"no model of the catalogue matches {' '.join(words)!r}; {meant}"
            "models of the Hugging Face hub are used by their name there, such as Qwen/Qwen3-0.6B"
        )
    rows = [HEADINGS, *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    for *cells, last in rows:
        click.echo("  ".join([*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), last]).rstrip())


def _text(entry: Entry) -> str:
    return f"{entry.name} {entry.title} {entry.license} {entry.source}".lower()


def _row(entry: Entry) -> tuple[str, ...]:
    size = "" if entry.bytes is None else size_text(entry.bytes)
    downloaded = ", downloaded" if entry.packages and packaged_path(entry).exists() else ""
    return entry.name, size, entry.license, f"{entry.title or entry.source}{downloaded}"
