"""Attention to a window of tokens and to entries, each of which stands for a block of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ferrule.archs.spec.norms import Norm


@dataclass(frozen=True)
class EntryIndexer:
    """Choice of entries by small keys, which are compressed as the entries are.

    A score is the sum over heads of weight * relu(query . key); queries are projected from the queries' latent, and
    weights from the input.
    """

    heads: int
    """Query heads."""
    head_dim: int
    """Length of a query head, and of a key."""
    entries: int
    """Entries that a token attends to."""


@dataclass(frozen=True)
class Compression:
    """Compression of blocks of tokens to entries: their mean, weighted by a softmax for each element."""

    block: int
    """Tokens of a block, counted from position 0; a divisor or a multiple of 16."""
    overlap: bool = False
    """Whether an entry also has the tokens of the block before."""
    indexer: EntryIndexer | None = None
    """Choice of the entries that a token attends to; None for all whose blocks are complete."""


@dataclass(frozen=True)
class CompressedAttention:
    """Attention to a window of tokens and to entries, in one softmax with sinks (DeepSeek-V4, 2026).

    One vector for each token or entry is key and value of all heads. Outputs are rotated back.
    """

    heads: int
    head_dim: int
    """Length of a query head, and of a vector."""
    scale: float
    """Factor on the scores."""
    window: int
    """Tokens up to its own that a token attends to."""
    query_rank: int
    """Width of the query latent."""
    norm: Norm
    """Norm of the query latent, and of vectors, entries and the indexer's keys."""
    query_norm: Norm
    """Norm of each query head."""
    rope: int
    """Index in ModelSpec.ropes; the last elements of heads and vectors are rotated."""
    output_groups: int
    """Groups of consecutive heads whose outputs are projected apart."""
    output_rank: int
    """Outputs of the projection of a group."""
    compression: Compression | None = None
    """Entries; None for attention to the window only."""
    type: Literal["compressed_attention"] = "compressed_attention"
