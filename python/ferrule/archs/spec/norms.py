"""Norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * (weight + weight_offset)."""

    eps: float
    weight_offset: float = 0.0
    weight: bool = True
    """Whether the norm has a weight; without one it is 1."""
    type: Literal["rms"] = "rms"


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / std * (weight + weight_offset) + bias."""

    eps: float
    weight_offset: float = 0.0
    weight: bool = True
    bias: bool = True
    type: Literal["layer"] = "layer"


Norm: TypeAlias = RmsNorm | LayerNorm


@dataclass(frozen=True)
class HeadNorm:
    """A norm of queries and keys."""

    norm: Norm
    over: Literal["head", "each_head", "heads"] = "head"
    """Unit that is normalized: each head with a shared weight ("head") or with its own ("each_head"), or all heads."""
    after_rope: bool = False
