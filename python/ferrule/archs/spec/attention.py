"""Mixer that attends to the tokens of a sequence, and its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ferrule.archs.spec.norms import HeadNorm, Norm


@dataclass(frozen=True)
class HeadProjections:
    """Query, key and value projections of multi-head, grouped-query and multi-query attention."""

    kv_heads: int
    key_dim: int
    value_dim: int
    bias: bool = False
    values_are_keys: bool = False
    """Whether the values are the projected keys, before their norm and rotation; there is no projection to values."""
    qk_norm: HeadNorm | None = None
    v_norm: Norm | None = None
    """Norm of each value head."""
    clip: float | None = None
    """Largest magnitude of queries, keys and values, after their norm."""
    type: Literal["heads"] = "heads"


@dataclass(frozen=True)
class LatentProjections:
    """Multi-head latent attention (MLA): one latent vector holds all heads' keys and values (DeepSeek-V2, 2024)."""

    query_rank: int | None
    """Width of the query latent; None if queries are projected directly."""
    kv_rank: int
    """Width of the key-value latent."""
    nope_dim: int
    """Leading elements of a head's query and key that are not rotated."""
    rope_dim: int
    """Rotated elements of a head's query and key; all heads share those of the key."""
    value_dim: int
    norm: Norm
    """Norm of both latents."""
    bias: bool = False
    """Whether the projections from the input have a bias."""
    split: bool = False
    """Whether the projection from the key-value latent is stored as two tensors with a matrix for each head: keys
    `[heads, kv_rank, nope_dim]` (transposed) and values `[heads, value_dim, kv_rank]`."""
    type: Literal["latent"] = "latent"


@dataclass(frozen=True)
class QueryGrowth:
    """Growth of queries: the factor at position p is 1 + beta * ln(1 + floor((p + offset) / length)) (Llama 4)."""

    beta: float
    length: int
    """Number of positions with the same factor."""
    offset: int = 0
    """Number added to positions."""


@dataclass(frozen=True)
class Indexer:
    """Indexer: chooses the tokens that a token attends to, by small queries and keys (DeepSeek-V3.2, 2025).

    Queries are projected from the queries' latent if the attention has one, else from the input.
    """

    heads: int
    """Query heads."""
    head_dim: int
    """Length of a query head, and of the key, which all heads read."""
    blocks: int
    """Blocks that a token attends to: those with the highest scores, up to its own."""
    block: int = 1
    """Consecutive tokens that are chosen together."""
    keys: Literal["tokens", "block_means"] = "tokens"
    """Keys that are scored. "tokens": the key of each token; the score of a block is its highest. "block_means": the
    mean of a block's keys, normed and rotated to the first position of the block; tokens of an incomplete block are
    always chosen."""
    local_blocks: int = 0
    """Blocks up to that of the token that are always among them."""
    choice: Literal["together", "sum", "each_head"] = "together"
    """Whether the heads choose together, by the sum of weight * relu(query . key) with weights that are projected from
    the input, by the same sum without weights, or each for its share of the key-value heads."""
    q_norm: Norm | None = None
    """Norm of each query head."""
    k_norm: Norm | None = None
    """Norm of the key."""
    rope: int | None = None
    """Index in ModelSpec.ropes; None for no rotary embedding."""


@dataclass(frozen=True)
class Attention:
    """Softmax attention."""

    heads: int
    scale: float
    """Factor on the scores."""
    projections: HeadProjections | LatentProjections
    output_bias: bool = False
    rope: int | None = None
    """Index in ModelSpec.ropes; None for no rotary embedding."""
    window: int | None = None
    """Positions that a token attends to, its own included; None for all. In encoders the window is centred."""
    chunk: int | None = None
    """Chunked attention: a token attends to no position before the last multiple of this number; None for all."""
    query_growth: QueryGrowth | None = None
    output_norm: Norm | None = None
    """Norm of the heads' outputs, over all heads, before the output projection."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    alibi_slopes: tuple[float, ...] | None = None
    """ALiBi slope of each head: factor on the distance between positions (Press et al. 2022)."""
    sinks: bool = False
    """Whether each head has a learned logit in the softmax without a value (attention sink)."""
    output_gate: Literal["elements", "heads"] | None = None
    """Whether each element or each head of the output is multiplied by the sigmoid of a projection of the input."""
    gate_bias: bool = False
    """Whether the projection to the gate has a bias."""
    kv_layer: int | None = None
    """Earlier layer whose keys and values are read, and which has the same sizes and window; there are only queries
    then. None for own keys and values."""
    indexer: Indexer | None = None
    """Choice of the tokens that a token attends to; None for all of them, or those that `selection_layer` chose."""
    selection_layer: int | None = None
    """Last layer before this one that has an indexer, whose choice is reused."""
    type: Literal["attention"] = "attention"
