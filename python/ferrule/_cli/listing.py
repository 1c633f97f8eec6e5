"""`ferrule list`: downloaded models, and packed files in the cache."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from ferrule._api.info import size_text
from ferrule._cli.help import Command
from ferrule._loading.downloads import downloads
from ferrule._loading.packed_cache import UNKNOWN, PackedCache, age_text


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
    """List downloaded models and local ones with packed files, the most recently used first.

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
    lines: dict[str, list[str]] = {}
    for model in models:
        lines[model.name] = [f"downloaded, {size_text(model.bytes)}, used {age_text(model.last_used)}"]
    names = {file: model.name for model in models for file in model.files}
    for entry in entries:
        # A damaged file does not say which model it is.
        name = entry.name if entry.model == UNKNOWN else names.get(entry.model, entry.model)
        packed = f"packed, {entry.quantization}, {size_text(entry.bytes)}, used {age_text(entry.last_used)}"
        lines.setdefault(name, []).append(packed)
    for name, uses in lines.items():
        print("\n    ".join([name, *uses]))
    if not lines:
        print("`ferrule search` lists models to download", file=sys.stderr)
    print(f"{len(models)} model{'' if len(models) == 1 else 's'}, {size_text(sum(model.bytes for model in models))}")
    print(f"{cache.directory}: {size_text(total)} of at most {size_text(cache.limit)}")
