"""Model specs: an architecture as data, and the checkpoint tensor of each role.

The files in `archs/` make a spec from config.json. The native module reads it as JSON, refuses unknown switches, and
runs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "tanh", "sigmoid"]


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


@dataclass(frozen=True)
class NoScaling:
    """Rotation frequencies as trained."""

    type: Literal["none"] = "none"


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float
    type: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows once the sequence is longer than the original context."""

    factor: float
    original_max_position_embeddings: int
    type: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class YarnScaling:
    """High frequencies stay, low ones are divided, with a ramp between (Peng et al. 2023)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    type: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: frequencies are scaled by wavelength, with a smooth transition."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    type: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: one factor for each frequency, with separate sets for short and for long sequences."""

    short_factor: tuple[float, ...]
    """Factors up to the original context length."""
    long_factor: tuple[float, ...]
    """Factors beyond the original context length."""
    original_max_position_embeddings: int
    attention_factor: float
    type: Literal["longrope"] = "longrope"


@dataclass(frozen=True)
class ProportionalScaling:
    """The first pairs rotate with the frequencies of the whole head, the others do not rotate (Gemma 4)."""

    rotated_pairs: int
    factor: float = 1.0
    """Divisor of every frequency."""
    type: Literal["proportional"] = "proportional"


Scaling: TypeAlias = (
    NoScaling | LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling | ProportionalScaling
)


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding."""

    theta: float
    rotary_dim: int
    """Number of leading elements of a head that are rotated."""
    interleaved: bool = False
    """Whether pairs are adjacent elements (GPT-J) rather than elements i and i + rotary_dim / 2 (Llama)."""
    scaling: Scaling = field(default_factory=NoScaling)


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
    type: Literal["attention"] = "attention"


@dataclass(frozen=True)
class Clamp:
    """Clamped gate of gpt-oss: g = min(gate, limit), u = clamp(up, -limit, limit), (u + 1) * g * sigmoid(alpha * g)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Xielu:
    """xIELU: alpha_p * x^2 + beta * x above 0, else alpha_n * (e^min(x, eps) - 1 - x) + beta * x (Huang 2024).

    alpha_p and alpha_n are learned: the softplus of a weight, to which alpha_n adds beta.
    """

    beta: float = 0.5
    eps: float = -1e-6


@dataclass(frozen=True)
class Dense:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: Clamp | None = None
    """Clamped gate in place of the activation."""
    xielu: Xielu | None = None
    """xIELU in place of the activation, in networks without a gate."""
    inner_norm: Norm | None = None
    """Norm of the input of `down`."""
    type: Literal["dense"] = "dense"


@dataclass(frozen=True)
class Router:
    """Router: chooses and weights a token's experts. Scores are f32; ties go to the lowest id."""

    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparse_mixer"] = "softmax"
    """Function from logits to scores, over all experts or over the chosen experts only; "sparse_mixer" is a softmax for
    each choice, over the experts that are left and nearly as good (Phi-3.5-MoE)."""
    normalize: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    bias: bool = False
    """Whether the logits have a bias."""
    correction_bias: bool = False
    """Whether a bias takes part in the choice, but not in the weights (DeepSeek-V3)."""
    groups: int = 1
    """Number of expert groups; experts are chosen from the best groups only."""
    groups_chosen: int = 1
    """Number of groups from which experts are chosen."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best score, or the sum of its best two."""
    jitter: float = 0.0
    """Half of the distance from the best logit, relative to the logit, up to which "sparse_mixer" counts an expert."""
    weigh_input: bool = False
    """Whether the weight multiplies the expert's input instead of its output."""


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: the router chooses a few networks for each token; a shared expert may run for all."""

    experts: int
    experts_per_token: int
    expert: Dense
    router: Router = field(default_factory=Router)
    shared: Dense | None = None
    """Shared expert, which runs for every token."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a projection of the input."""
    type: Literal["experts"] = "experts"


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
    update_scale: float = 1.0
    """Largest factor of an update; 2 allows negative eigenvalues."""
    decay: Decay = field(default_factory=Decay)
    gate: Activation = "silu"
    """Activation of the gate of the output."""
    gate_rank: int | None = None
    """Rank of the gate's projection if it is the product of two."""
    type: Literal["delta_net"] = "delta_net"


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
    """Whether the projections have a bias."""
    kernel_bias: bool = True
    """Whether the convolution has a bias."""
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


Ffn: TypeAlias = Dense | Experts
Mixer: TypeAlias = Attention | Dense | Experts | ShortConvolution | DeltaNet | Mamba2
"""Function of a residual block from its normed input to what it adds to the stream."""
AnyMixer = TypeVar("AnyMixer", Attention, Dense, Experts, ShortConvolution, DeltaNet, Mamba2)


@dataclass(frozen=True)
class Block:
    """Residual block: x = sum_norm(x + residual_scale * post_norm(mixer(norm(x))))."""

    name: str
    """Name in roles: block "ffn" has `layers.0.ffn.down.weight`, and `layers.0.ffn_norm.weight` for its norm."""
    mixer: Mixer
    norm: Norm | None = None
    """Norm of the mixer's input."""
    post_norm: Norm | None = None
    """Norm of the mixer's output."""
    sum_norm: Norm | None = None
    """Norm after the output is added to the residual stream."""
    parallel: bool = False
    """Whether the block reads the same residual stream as the block before it; without a norm of its own it then reads
    that block's normed input."""
    residual_scale: float = 1.0
    """Factor on the mixer's output."""
    residual_after_norm: bool = False
    """Whether the output is added to the normed input rather than the input."""


@dataclass(frozen=True)
class Layer:
    """Residual blocks, which run in order."""

    blocks: tuple[Block, ...]
    scalar: bool = False
    """Whether the residual stream is multiplied by a stored number after the last block."""

    def block(self, name: str) -> Block:
        """Returns the block of this name.

        Raises LookupError if the layer has none.
        """
        for block in self.blocks:
            if block.name == name:
                return block
        raise LookupError(f"no block {name!r}; the layer has {', '.join(block.name for block in self.blocks)}")

    @property
    def attention(self) -> Attention:
        """The layer's attention.

        Raises LookupError if the layer has none, or several.
        """
        match self.mixers(Attention):
            case [attention]:
                return attention
            case found:
                raise LookupError(f"a layer with one attention was expected, this one has {len(found)}")

    def mixers(self, kind: type[AnyMixer]) -> list[AnyMixer]:
        """Returns the mixers of a kind, in the order of their blocks."""
        return [block.mixer for block in self.blocks if isinstance(block.mixer, kind)]


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

    scale: float = 1.0
    """Factor on token embeddings."""
    width: int | None = None
    """Width of a row if a projection maps it to hidden_size (and back before the lm_head); None for hidden_size."""
    positions: LearnedPositions | SinusoidalPositions | None = None
    token_types: int = 0
    """Rows of the token type table; row 0 is the default type."""
    norm: Norm | None = None


@dataclass(frozen=True)
class LmHead:
    """lm_head: maps hidden states to logits."""

    tied: bool
    """Whether the matrix is that of the embedding."""
    bias: bool = False
    scale: float = 1.0
    """Factor on the logits."""
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap)."""


Pooling: TypeAlias = Literal["cls", "mean", "last"]
"""Pooled hidden state of a text: the first token's, the mean of all, or the last token's."""


@dataclass(frozen=True)
class Classifier:
    """Classifier: scores labels by labels(norm(activation(dense(pooled))))."""

    labels: int
    pooling: Pooling
    activation: Activation | None = None
    """Activation after the dense projection; None if the classifier has neither."""
    dense_bias: bool = False
    """Whether the dense projection has a bias."""
    norm: Norm | None = None
    """Norm after the activation."""
    bias: bool = False
    """Whether the label projection has a bias."""


@dataclass(frozen=True)
class TextProjection:
    """Projection activation(W x + b) of a text's pooled hidden state to its embedding."""

    width: int
    """Size of the output."""
    activation: Activation | None = None
    bias: bool = False


@dataclass(frozen=True)
class Part:
    """Slice of a fused matrix: `rows` of every `stride` rows, from row `first` on."""

    first: int
    rows: int
    stride: int


@dataclass(frozen=True)
class Stack:
    """Slice of a stacked tensor: matrix `index` of `of`."""

    index: int
    of: int


@dataclass(frozen=True)
class Tensor:
    """Checkpoint tensor, or slice of one, that holds a role's weights."""

    names: tuple[str, ...]
    """Name of the tensor, or of several whose rows are concatenated; `2_Dense/linear.weight` is in a subfolder."""
    transposed: bool = False
    """Whether the tensor is stored as [inputs, outputs]."""
    part: Part | None = None
    stack: Stack | None = None
    alternative: Tensor | None = None
    """Tensor in checkpoints that have none of the first name."""


@dataclass(frozen=True)
class Gptq:
    """GPTQ weights (Frantar et al. 2022) as AutoGPTQ and GPTQModel save them."""

    bits: int
    """Bits of a code: 2, 3, 4 or 8."""
    group_size: int | None
    """Inputs that share a scale; None for a whole row."""
    desc_act: bool = False
    """Whether each input's group is listed (act-order)."""
    zeros_less_one: bool = True
    """Whether zero points are stored minus 1, as in version 1 of the format."""
    method: Literal["gptq"] = "gptq"


@dataclass(frozen=True)
class Awq:
    """AWQ weights of 4 bits as AutoAWQ saves them for its GEMM kernels (Lin et al. 2023)."""

    group_size: int | None
    """Inputs that share a scale; None for a whole row."""
    method: Literal["awq"] = "awq"


@dataclass(frozen=True)
class CompressedWeights:
    """One weight scheme of a compressed-tensors checkpoint."""

    kind: Literal["int", "float"]
    bits: int
    """Bits of a code: 2, 4 or 8; 8 for floating-point codes."""
    symmetric: bool = True
    """Whether zero is the middle code."""
    group_size: int | None = None
    """Inputs that share a scale; None for a scale for each output or for the tensor."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale."""


@dataclass(frozen=True)
class CompressedTensors:
    """Weights as LLM Compressor saves them; the tensors of a weight determine its scheme."""

    weights: tuple[CompressedWeights, ...]
    method: Literal["compressed-tensors"] = "compressed-tensors"


@dataclass(frozen=True)
class Fp8:
    """8-bit floating-point weights with scales."""

    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None for a scale for each output or for the tensor."""
    method: Literal["fp8"] = "fp8"


@dataclass(frozen=True)
class BitsAndBytes:
    """bitsandbytes weights: 4-bit codes by table and block, or 8-bit codes by output (Dettmers et al. 2022, 2023)."""

    codes: Literal["nf4", "fp4", "int8"]
    method: Literal["bitsandbytes"] = "bitsandbytes"


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 weights: 4-bit floating-point codes with a power-of-two scale for each 32 (OCP MX 1.0)."""

    method: Literal["mxfp4"] = "mxfp4"


StoredAs: TypeAlias = Gptq | Awq | CompressedTensors | Fp8 | BitsAndBytes | Mxfp4


@dataclass(frozen=True)
class ModelSpec:
    """Complete description of a model."""

    architecture: str
    """Model family, for messages."""
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """Longest context in tokens, RoPE scaling included."""
    layers: list[Layer]
    final_norm: Norm | None
    lm_head: LmHead | None
    """lm_head; None for models that return hidden states only."""
    embedding: Embedding = field(default_factory=Embedding)
    ropes: list[Rope] = field(default_factory=list[Rope])
    causal: bool = True
    """Whether a token attends only to itself and earlier tokens."""
    classifier: Classifier | None = None
    text_projections: list[TextProjection] = field(default_factory=list[TextProjection])
    """Projections from the pooled hidden state to the embedding, applied in order."""
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Tensor of each role that `tensors.roles` lists."""
    prefixes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Pairs of a name prefix and its replacement, tried if a tensor is missing under its name."""
    stored_as: StoredAs | None = None
    """Quantization of the checkpoint; None if it is not quantized."""

    @property
    def generates(self) -> bool:
        """Whether the model generates text."""
        return self.causal and self.lm_head is not None

    @property
    def embedding_size(self) -> int:
        """Size of a text embedding."""
        return self.text_projections[-1].width if self.text_projections else self.hidden_size

    def to_json(self) -> str:
        """Returns the spec as JSON for the native module."""
        return json.dumps(self, default=vars, allow_nan=False)
