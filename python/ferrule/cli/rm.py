"""`ferrule rm`: removes packed files from the cache."""

from __future__ import annotations

import sys

import click

from ferrule.info import size_text
from ferrule.loading.packed_cache import PackedCache


@click.command("rm")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="Remove all of them.")
def command(names: tuple[str, ...], everything: bool) -> None:
    """Remove packed files by the names that `ferrule list` shows, or all those of a model by its name.

    Models themselves stay; the next load packs anew. Programs that have a file mapped go on with it.
    """
    if bool(names) == everything:
        raise click.UsageError("give names, or --all")
    cache = PackedCache.open()
    entries = cache.entries()
    for name in names:
        if not any(name in (entry.name, entry.model) for entry in entries):
            known = ", ".join(entry.name for entry in entries) or "nothing"
            raise click.UsageError(f"{name!r} is not in the cache, which has {known}")
    chosen = [entry for entry in entries if everything or entry.name in names or entry.model in names]
    cache.remove(chosen)
    if everything:
        cache.remove_abandoned()
    print(f"{len(chosen)} removed, {size_text(sum(entry.bytes for entry in chosen))}", file=sys.stderr)
