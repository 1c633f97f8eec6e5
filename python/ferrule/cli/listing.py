"""`ferrule list`: the packed files that loads have left in the cache."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ferrule.info import size_text
from ferrule.loading.packed_cache import PackedCache, age_text


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show the packed files in the cache, what was used last first.

    They are made by the first load of a large model, and mapped by the next ones. $FERRULE_CACHE names another place
    than ~/.cache/ferrule, $FERRULE_PACKED_CACHE_LIMIT the bytes that they may take.
    """
    cache = PackedCache.open()
    entries = cache.entries()
    total = sum(entry.bytes for entry in entries)
    if as_json:
        listed = [{**asdict(entry), "path": str(entry.path)} for entry in entries]
        print(json.dumps({"directory": str(cache.directory), "limit": cache.limit, "bytes": total, "files": listed}))
        return
    for entry in entries:
        used = age_text(entry.last_used)
        print(f"{entry.name}\n    {entry.model}, {entry.quantization}, {size_text(entry.bytes)}, used {used}")
    print(f"{cache.directory}: {size_text(total)} of at most {size_text(cache.limit)}")
