"""`ferrule list`: downloaded models, and packed files in the cache."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ferrule._api.info import size_text
from ferrule._cli.help import Command
from ferrule._loading.hub_cache import downloads
from ferrule._loading.packed_cache import PackedCache, age_text


@click.command(
    "list",
    cls=Command,
    examples=[
        ("All models and packed files:", "ferrule list"),
        ("Names of the models:", "ferrule list --json | jq -r '.models[].name'"),
    ],
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List models downloaded from the hub and packed files, the most recently used first.

    The first load of a large model writes a packed file, which later loads map. $FERRULE_CACHE sets the directory
    (default ~/.cache/ferrule), $FERRULE_PACKED_CACHE_LIMIT the limit of the size in bytes (default 100 GiB).
    """
    cache = PackedCache.open()
    entries, models = cache.entries(), downloads()
    total = sum(entry.bytes for entry in entries)
    if as_json:
        listed = [{**asdict(entry), "path": str(entry.path)} for entry in entries]
        found = [{**asdict(model), "files": list(model.files)} for model in models]
        packed = {"directory": str(cache.directory), "limit": cache.limit, "bytes": total, "files": listed}
        print(json.dumps({"models": found, **packed}))
        return
    for model in models:
        print(f"{model.name}\n    downloaded, {size_text(model.bytes)}, used {age_text(model.last_used)}")
    for entry in entries:
        used = age_text(entry.last_used)
        print(f"{entry.name}\n    packed, {entry.model}, {entry.quantization}, {size_text(entry.bytes)}, used {used}")
    print(f"{len(models)} models, {size_text(sum(model.bytes for model in models))}")
    print(f"{cache.directory}: {size_text(total)} of at most {size_text(cache.limit)}")
