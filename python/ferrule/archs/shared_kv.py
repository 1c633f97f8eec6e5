"""Layers that read the keys and values of an earlier layer: Gemma 3n and 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.spec import Attention, HeadProjections


def kv_layers(config: Config, windows: Sequence[int | None]) -> list[int | None]:
    """Returns the layer whose keys and values each layer reads, None for its own.

    The last `num_kv_shared_layers` layers read those of the last layer before them that has the same type.
    """
    shared = config.integer("num_kv_shared_layers", default=0, low=0)
    first = len(windows) - shared
    if shared and first <= 0:
        raise config.error("num_kv_shared_layers", f"below num_hidden_layers ({len(windows)})")
    read: list[int | None] = [None] * first
    for window in windows[first:]:
        alike = [index for index in range(first) if windows[index] == window]
        if not alike:
            kind = "full_attention" if window is None else "sliding_attention"
            limit = f"such that one of the first {first} layers, which are not shared, is of the type {kind} as well"
            raise config.error("num_kv_shared_layers", limit)
        read.append(alike[-1])
    return read


def reading(attention: Attention, layer: int) -> Attention:
    """Returns an attention that has only queries, and reads the keys and values of another layer."""
    projections = attention.projections
    if isinstance(projections, HeadProjections):
        projections = replace(projections, values_are_keys=False, v_norm=None)
    return replace(attention, projections=projections, kv_layer=layer)
