"""Embedding: from token ids to hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ferrule.archs.spec.norms import Norm


@dataclass(frozen=True)
class Table:
    """Table that is looked up by token id or by hashes of tokens; only the rows of a step are read from the file."""

    rows: int
    columns: int
    hashed: bool = False
    """Whether hashes of tokens select the rows, rather than token ids."""


@dataclass(frozen=True)
class LearnedPositions:
    """Learned position embeddings: row position + offset of a table is added."""

    rows: int
    offset: int = 0
    type: Literal["learned"] = "learned"


@dataclass(frozen=True)
class SinusoidalPositions:
    """Sinusoidal position embeddings: sines and then cosines of position + offset are added (Vaswani et al. 2017)."""

    offset: int = 0
    type: Literal["sinusoidal"] = "sinusoidal"


@dataclass(frozen=True)
class Embedding:
    """Embedding: maps token ids to hidden states."""

    tokens: bool = True
    """Whether there is a table of token embeddings; if not, each token gets a row of features."""
    scale: float = 1.0
    """Factor on token embeddings."""
    width: int | None = None
    """Width of a row if a projection maps it to hidden_size (and back before the lm_head); None for hidden_size."""
    positions: LearnedPositions | SinusoidalPositions | None = None
    projection_bias: bool = False
    """Whether the projection adds a bias."""
    token_types: int = 0
    """Rows of the token type table; row 0 is the default type."""
    norm: Norm | None = None
