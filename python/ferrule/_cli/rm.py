"""`ferrule rm`: removes downloaded models and packed files."""

from __future__ import annotations

import sys

import click

from ferrule._api.info import size_text
from ferrule._cli.help import Command
from ferrule._loading.downloads import downloads, find_downloads, remove_downloads
from ferrule._loading.packed_cache import PackedCache


@click.command(
    "rm",
    cls=Command,
    examples=[
        ("A model with its packed files:", "ferrule rm smollm2:135m"),
        ("Packed files only; the next load packs again:", "ferrule rm --packed Qwen/Qwen3-0.6B"),
        ("All packed files:", "ferrule rm --all"),
    ],
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--packed", is_flag=True, help="Remove packed files only.")
@click.option("--all", "everything", is_flag=True, help="Remove all packed files and keep the models.")
@click.option("-y", "--yes", is_flag=True, help="Remove models without asking.")
def command(names: tuple[str, ...], *, packed: bool, everything: bool, yes: bool) -> None:
    """Remove models and packed files by the names that `ferrule list` shows.

    A downloaded model is removed with its packed files, after confirmation on a terminal: other programs share the
    cache of the hub. Model directories outside the cache are never removed. Programs that have a file open can still
    read it.
    """
    if bool(names) == everything:
        raise click.UsageError("give either names or --all")
    cache = PackedCache.open()
    entries, models = cache.entries(), downloads()
    removed = {each.name: each for name in names if not packed for each in find_downloads(name, models)}
    for name in names:
        if not any(name in (entry.name, entry.model) for entry in entries) and not (
            not packed and find_downloads(name, models)
        ):
            known = [*(model.name for model in models if not packed), *(entry.name for entry in entries)]
            raise click.UsageError(f"{name!r} is not in the cache, which has {', '.join(known) or 'nothing'}")
    sources = {*names, *removed, *(file for each in removed.values() for file in each.files)}
    chosen = [entry for entry in entries if everything or {entry.name, entry.model} & sources]
    size = sum(each.bytes for each in removed.values())
    if removed and not yes and sys.stdin.isatty():
        click.confirm(f"Remove {', '.join(removed)}, {size_text(size)}?", abort=True, err=True)
    remove_downloads(removed.values())
    cache.remove(chosen)
    if everything:
        cache.remove_abandoned()
    size += sum(entry.bytes for entry in chosen)
    print(f"{len(chosen) + len(removed)} removed, {size_text(size)}", file=sys.stderr)
