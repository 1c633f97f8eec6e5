"""Mixers with a state for each sequence: convolutions, linear attention and state-space models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ferrule.archs.spec.activation import Activation
from ferrule.archs.spec.norms import Norm, RmsNorm


@dataclass(frozen=True)
class ShortConvolution:
    """Gated short convolution: output(c * convolution(b * x)), where b, c and x are projections of the input (LFM2)."""

    channels: int
    """Number of channels: the width of the residual stream."""
    taps: int
    """Number of tokens that an output depends on, its own included."""
    bias: bool = False
    """Whether the projections and the convolution have a bias."""
    type: Literal["short_convolution"] = "short_convolution"


@dataclass(frozen=True)
class Decay:
    """Decay of a delta net's state, from a projection f of the input, with a rate for each head."""

    by_key: bool = False
    """Whether each element of the key has its own factor (Kimi delta attention), rather than each head."""
    rank: int | None = None
    """Rank of the projection if it is the product of two."""
    lower_bound: float | None = None
    """Logarithm b of the smallest factor, which is then exp(b * sigmoid(rate * (f(x) + bias))); None for
    exp(-rate * softplus(f(x) + bias))."""


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention whose state decays and learns by a delta rule (gated delta net, Kimi delta attention)."""

    key_heads: int
    """Number of heads of queries and keys."""
    value_heads: int
    """Number of heads of values and states."""
    key_dim: int
    value_dim: int
    taps: int
    """Number of tokens that an output of the convolution over queries, keys and values depends on."""
    norm: RmsNorm
    """Norm of each head of the output."""
    activation: Activation = "silu"
    """Activation of queries, keys and values, after the convolution."""
    alternating: bool = False
    """Whether value head h reads key head `h % key_heads`, rather than `h // (value_heads // key_heads)`."""
    update_scale: float = 1.0
    """Largest factor of an update; 2 allows negative eigenvalues."""
    decay: Decay = field(default_factory=Decay)
    gate: Activation = "silu"
    """Activation of the gate of the output."""
    gate_rank: int | None = None
    """Rank of the gate's projection if it is the product of two."""
    type: Literal["delta_net"] = "delta_net"


@dataclass(frozen=True)
class LightningAttention:
    """Linear attention whose state decays by a constant of each head (lightning attention, Qin et al. 2024)."""

    head_dim: int
    """Length of a head of queries, keys and values."""
    decays: tuple[float, ...]
    """Factor of the state of each head per token; as many as heads."""
    norm: Norm
    """Norm of the output, over all heads."""
    activation: Activation = "silu"
    """Activation of queries, keys and values."""
    type: Literal["lightning_attention"] = "lightning_attention"


@dataclass(frozen=True)
class Mamba:
    """Mamba (Gu and Dao 2023): a recurrence of each channel, whose steps and inputs depend on the tokens."""

    channels: int
    """Number of channels of values, gate and output."""
    state_size: int
    """Number of elements of a channel's state: the length of keys (B) and queries (C)."""
    step_rank: int
    """Rank of the projection to step sizes."""
    taps: int
    """Number of tokens that an output of the convolution depends on."""
    bias: bool = False
    """Whether the projections from and to the residual stream have a bias."""
    kernel_bias: bool = True
    """Whether the convolution has a bias."""
    norm: RmsNorm | None = None
    """Norm of step sizes in their low rank, of keys and of queries, each with its own weight."""
    type: Literal["mamba"] = "mamba"


@dataclass(frozen=True)
class Mamba2:
    """Mamba 2 (Dao and Gu 2024): linear attention whose state decays and grows by steps that depend on the input."""

    heads: int
    """Number of heads of values and states."""
    head_dim: int
    groups: int
    """Number of groups of heads that share keys (B) and queries (C)."""
    state_size: int
    """Length of keys and queries."""
    taps: int
    """Number of tokens that an output of the convolution depends on."""
    bias: bool = False
    """Whether the projection of the input has a bias."""
    output_bias: bool = False
    """Whether the projection back has a bias."""
    kernel_bias: bool = True
    """Whether the convolution has a bias."""
    activation: Activation = "silu"
    """Activation of values, keys and queries, after the convolution."""
    min_step: float = 0.0
    """Smallest step size."""
    max_step: float | None = None
    """Largest step size."""
    scales: tuple[float, float, float, float, float] | None = None
    """Factors of the input projection's outputs: of the gate, values, keys, queries and step sizes."""
    norm: RmsNorm | None = None
    """Norm of the output."""
    norm_groups: int = 1
    """Number of parts of the output that are normed separately."""
    norm_before_gate: bool = False
    type: Literal["mamba2"] = "mamba2"


@dataclass(frozen=True)
class RgLru:
    """Real-gated linear recurrent unit (RG-LRU) of Griffin (De et al. 2024), with its convolution and output gate."""

    channels: int
    """Number of channels of values, gate and output."""
    heads: int
    """Number of heads, whose gates read only the head."""
    taps: int
    """Number of tokens that an output of the convolution depends on."""
    activation: Activation
    """Activation of the gate of the output."""
    type: Literal["rg_lru"] = "rg_lru"


@dataclass(frozen=True)
class RwkvTimeMix:
    """Time mixing of RWKV 4 (Peng et al. 2023): a gated mean of the values of all tokens, whose weights decay."""

    hidden_size: int
    """Width of the residual stream."""
    channels: int
    """Number of channels of keys, values and receptance."""
    type: Literal["rwkv_time_mix"] = "rwkv_time_mix"


@dataclass(frozen=True)
class RwkvChannelMix:
    """Channel mixing of RWKV 4 (Peng et al. 2023): a gated network that reads a token and the token before it."""

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the inner layer."""
    type: Literal["rwkv_channel_mix"] = "rwkv_channel_mix"


@dataclass(frozen=True)
class NgramEmbedding:
    """Embedding of hashed n-grams, on all residual streams side by side (Qwen4).

    Hashes of the last tokens select rows of tables. Their projection, gated for each stream by its product with a key
    of the rows, is added to the stream, and so is a convolution of it.
    """

    width: int
    """Width of a residual stream."""
    streams: int
    """Number of residual streams."""
    first_table: int = field(compare=False)
    """Index of the first table in ModelSpec.tables; the rows of all tables follow one another."""
    tables: int
    """Number of tables."""
    columns: int
    """Columns of the tables."""
    multipliers: tuple[int, ...] = field(compare=False)
    """Multiplier of each token of the longest n-gram, the last token first. The hash is the exclusive or of the
    products, which wrap around in 64 bits."""
    hash_rows: tuple[int, ...] = field(compare=False)
    """Rows of each hash, which is taken modulo their number. Each n-gram length has the same number of hashes."""
    end: int
    """Token that ends a text; the tokens up to it, and those before the first, count as this token."""
    norm: Norm
    """Norm of keys, queries and inputs of the convolution, which has its own weight for each stream."""
    taps: int
    """Number of inputs that an output of the convolution depends on."""
    dilation: int
    """Number of tokens from one of these inputs to the next."""
    type: Literal["ngram_embedding"] = "ngram_embedding"


RecurrentMixer: TypeAlias = (
    ShortConvolution
    | DeltaNet
    | LightningAttention
    | Mamba
    | Mamba2
    | NgramEmbedding
    | RgLru
    | RwkvTimeMix
    | RwkvChannelMix
)
"""Mixer with a state for each sequence."""
