"""Mixers that read nothing but the token itself, other than feed-forward networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ferrule.archs.spec.activation import Activation
from ferrule.archs.spec.norms import Norm


@dataclass(frozen=True)
class Laurel:
    """Learned augmented residual: x + norm(right(left(x))) (Menghani et al. 2024)."""

    rank: int
    norm: Norm
    type: Literal["laurel"] = "laurel"


@dataclass(frozen=True)
class PerLayerEmbedding:
    """Per-layer embedding: output(activation(gate(x)) * e), where e is a vector of the token for this layer (Gemma 3n).

    e = (table_scale * table[token] + norm(projection_scale * projection(embedding))) * sum_scale
    """

    width: int
    """Length of a token's vector."""
    activation: Activation
    table: int
    """Index in ModelSpec.tables."""
    first_column: int = field(compare=False)
    """First column of this layer's vectors in the table; layers that differ only in this are equal."""
    table_scale: float
    projection_scale: float
    norm: Norm
    sum_scale: float
    type: Literal["per_layer_embedding"] = "per_layer_embedding"


@dataclass(frozen=True)
class Projection:
    """One matrix, from the width of the residual stream to the same width."""

    bias: bool = False
    type: Literal["projection"] = "projection"
