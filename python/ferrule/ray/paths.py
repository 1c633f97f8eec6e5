"""Paths of models and caches, for actors in other working directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def absolute(name: str | None) -> str | None:
    """Returns the path of a local model; links are kept, since they may differ on other hosts."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


def with_absolute_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of AsyncLLM that do not depend on the working directory."""
    changed = {**options, "tokenizer": absolute(options.get("tokenizer"))}
    if (cache := options.get("prefix_cache_dir")) is not None and not cache.startswith("~"):
        changed["prefix_cache_dir"] = str(Path(cache).absolute())  # it may not exist yet
    if (speculation := options.get("speculative_config")) is not None and "model" in speculation:
        changed["speculative_config"] = {**speculation, "model": absolute(speculation["model"])}
    if (adapters := options.get("lora_modules")) is not None:
        changed["lora_modules"] = {name: absolute(path) for name, path in adapters.items()}
    return changed
