"""A model as data: everything that tells one architecture from another, and which stored tensor plays which role.

`archs/` write it from config.json; the native module reads its JSON, refuses switches that it does not know, and
runs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "tanh"]


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * (weight + weight_offset)."""

    eps: float
    weight_offset: float = 0.0
    weight: bool = True
    """Whether there is a weight; without one it counts as 1."""
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
    """Each head on its own, with one weight for all ("head") or one for each ("each_head"); or all heads as one row."""
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
    """As Llama 3.1 does: by wavelength, smoothly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    type: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own, of two sets: for short sequences and for long ones."""

    short_factor: tuple[float, ...]
    """Up to the original context."""
    long_factor: tuple[float, ...]
    """Beyond it."""
    original_max_position_embeddings: int
    attention_factor: float
    type: Literal["longrope"] = "longrope"


Scaling: TypeAlias = NoScaling | LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding."""

    theta: float
    rotary_dim: int
    """Number of leading elements of a head that are rotated."""
    interleaved: bool = False
    """Pairs are neighbours (GPT-J), not element i and i + rotary_dim / 2 (Llama)."""
    scaling: Scaling = field(default_factory=NoScaling)


@dataclass(frozen=True)
class HeadProjections:
    """Queries, keys and values are projected from the input, with any number of query heads to a key-value head."""

    kv_heads: int
    key_dim: int
    value_dim: int
    bias: bool = False
    qk_norm: HeadNorm | None = None
    clip: float | None = None
    """Largest magnitude of queries, keys and values, once normed."""
    type: Literal["heads"] = "heads"


@dataclass(frozen=True)
class LatentProjections:
    """Keys and values of all heads come out of one latent vector (MLA; DeepSeek-V2, 2024)."""

    query_rank: int | None
    """Width of the queries' latent; None where they are projected at once."""
    kv_rank: int
    """Width of the keys' and values' latent."""
    nope_dim: int
    """Leading elements of a head's query and key, which are not rotated."""
    rope_dim: int
    """The others, which are; a key has one set of them for all heads."""
    value_dim: int
    norm: Norm
    """Of both latents."""
    bias: bool = False
    """Of the projections from the input."""
    split: bool = False
    """Whether the way out of the keys' and values' latent is stored as two tensors, with a matrix for each head:
    `[heads, kv_rank, nope_dim]` for the keys, the other way round, and `[heads, value_dim, kv_rank]`."""
    type: Literal["latent"] = "latent"


@dataclass(frozen=True)
class Attention:
    """Softmax attention."""

    heads: int
    scale: float
    """Factor on the scores."""
    projections: HeadProjections | LatentProjections
    output_bias: bool = False
    rope: int | None = None
    """Index in ModelSpec.ropes; None for no rotation."""
    window: int | None = None
    """Positions that a row sees, its own among them; None for all. Encoders see as many on either side."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    alibi_slopes: tuple[float, ...] | None = None
    """For each head the factor on the distance between positions (Press et al. 2022)."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and mixes in nothing."""


@dataclass(frozen=True)
class Clamp:
    """gpt-oss's gate: g = min(gate, limit), u = clamp(up, -limit, limit), (u + 1) * g * sigmoid(alpha * g)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Dense:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: Clamp | None = None
    """In place of the activation."""
    type: Literal["dense"] = "dense"


@dataclass(frozen=True)
class Router:
    """How a mixture chooses experts for a token and weighs them. Scores are f32; ties go to the lowest id."""

    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Of all experts' logits, or of those of the chosen ones alone."""
    normalize: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    bias: bool = False
    """Whether the logits have a bias."""
    correction_bias: bool = False
    """Whether a bias takes part in the choice, but not in the weights (DeepSeek-V3)."""
    groups: int = 1
    """Neighbouring experts form groups; only experts of the best ones are chosen."""
    groups_chosen: int = 1
    group_score: Literal["max", "top2"] = "top2"
    """A group's best score, or the sum of its best two."""


@dataclass(frozen=True)
class Experts:
    """A mixture: of many networks a few run for each token, and perhaps one for all."""

    experts: int
    experts_per_token: int
    expert: Dense
    router: Router = field(default_factory=Router)
    shared: Dense | None = None
    """A network that every token goes through."""
    shared_gate: bool = False
    """Whether what it gives is multiplied by the sigmoid of a projection of the input."""
    type: Literal["experts"] = "experts"


Ffn: TypeAlias = Dense | Experts


@dataclass(frozen=True)
class Layer:
    """x = sum_norm(x + post_norm(attention(norm(x)))), then the same with the feed-forward network."""

    attention: Attention
    ffn: Ffn
    attention_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    attention_sum_norm: Norm | None = None
    ffn_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    ffn_sum_norm: Norm | None = None
    parallel: bool = False
    """Both blocks read the layer's input. A network without a norm of its own reads what attention reads."""
    residual_scale: float = 1.0
    """Factor on what a block adds."""
    residual_after_norm: bool = False
    """What is added to is the normed input, not the input."""


@dataclass(frozen=True)
class LearnedPositions:
    """A learned vector for each position is added: row position + offset of a table."""

    rows: int
    offset: int = 0
    type: Literal["learned"] = "learned"


@dataclass(frozen=True)
class SinusoidalPositions:
    """Sines and then cosines of position + offset are added (Vaswani et al. 2017)."""

    offset: int = 0
    type: Literal["sinusoidal"] = "sinusoidal"


@dataclass(frozen=True)
class Embedding:
    """From token ids to hidden states."""

    scale: float = 1.0
    """Factor on the tokens' rows."""
    width: int | None = None
    """Of a row, where a projection leads from there to hidden_size (and back before the head)."""
    positions: LearnedPositions | SinusoidalPositions | None = None
    token_types: int = 0
    """Rows of a table for kinds of tokens; the first is for all tokens that nobody says otherwise of."""
    norm: Norm | None = None


@dataclass(frozen=True)
class Head:
    """From hidden states to logits."""

    tied: bool
    """Whether the matrix is the embedding's."""
    bias: bool = False
    scale: float = 1.0
    """Factor on the logits."""
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap)."""


Pooling: TypeAlias = Literal["cls", "mean", "last"]
"""Which hidden state stands for a whole text: the first token's, the mean of all, the last token's."""


@dataclass(frozen=True)
class Classifier:
    """A score for each label: labels(norm(activation(dense(pooled))))."""

    labels: int
    pooling: Pooling
    activation: Activation | None = None
    """After a square projection; None where there is neither."""
    dense_bias: bool = False
    """Whether that projection adds a bias."""
    norm: Norm | None = None
    """After the activation."""
    bias: bool = False
    """Whether the labels have a bias."""


@dataclass(frozen=True)
class TextProjection:
    """activation(W x + b) of a text's pooled hidden state, on the way to its embedding."""

    width: int
    """Numbers that it gives."""
    activation: Activation | None = None
    bias: bool = False


@dataclass(frozen=True)
class Part:
    """Rows of a stored matrix that holds several: `rows` of every `stride`, from row `first` on."""

    first: int
    rows: int
    stride: int


@dataclass(frozen=True)
class Stack:
    """One of several matrices that are stored as one tensor."""

    index: int
    of: int


@dataclass(frozen=True)
class Tensor:
    """Where a role's weights lie in the checkpoint."""

    names: tuple[str, ...]
    """One tensor, or several whose rows follow one another. `2_Dense/linear.weight` is one of a folder within."""
    transposed: bool = False
    """Stored as [inputs, outputs]."""
    part: Part | None = None
    stack: Stack | None = None


@dataclass(frozen=True)
class Gptq:
    """Whole numbers by group, outputs side by side (Frantar et al. 2022), as AutoGPTQ and GPTQModel save them."""

    bits: int
    """Of a code: 2, 3, 4 or 8."""
    group_size: int | None
    """Inputs that share a scale; None for all of a row."""
    desc_act: bool = False
    """Whether the inputs' groups are listed, as they were quantized in another order than they have."""
    zeros_less_one: bool = True
    """Whether zero points are stored less 1, as in the format's first version."""
    method: Literal["gptq"] = "gptq"


@dataclass(frozen=True)
class Awq:
    """Codes of four bits by group, as AutoAWQ saves them for its GEMM kernels (Lin et al. 2023)."""

    group_size: int | None
    """Inputs that share a scale; None for all of a row."""
    method: Literal["awq"] = "awq"


@dataclass(frozen=True)
class CompressedWeights:
    """A kind of weights of compressed-tensors."""

    kind: Literal["int", "float"]
    bits: int
    """Of a code: 2, 4 or 8; of a floating-point one 8."""
    symmetric: bool = True
    """Whether the code of the number 0 is in the middle."""
    group_size: int | None = None
    """Inputs that share a scale; None where an output's do, or all of a tensor."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale."""


@dataclass(frozen=True)
class CompressedTensors:
    """What LLM Compressor saves; which of its kinds a weight is of its tensors tell."""

    weights: tuple[CompressedWeights, ...]
    method: Literal["compressed-tensors"] = "compressed-tensors"


@dataclass(frozen=True)
class Fp8:
    """Floating-point numbers of 8 bits with scales."""

    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None where an output's do, or all of a tensor."""
    method: Literal["fp8"] = "fp8"


@dataclass(frozen=True)
class BitsAndBytes:
    """Codes of four bits by table and block, or of eight by output (Dettmers et al. 2022, 2023)."""

    codes: Literal["nf4", "fp4", "int8"]
    method: Literal["bitsandbytes"] = "bitsandbytes"


@dataclass(frozen=True)
class Mxfp4:
    """Floating-point numbers of 4 bits, 32 to a power of two (OCP MX 1.0), as gpt-oss has its experts."""

    method: Literal["mxfp4"] = "mxfp4"


StoredAs: TypeAlias = Gptq | Awq | CompressedTensors | Fp8 | BitsAndBytes | Mxfp4


@dataclass(frozen=True)
class ModelSpec:
    """A model, completely."""

    architecture: str
    """Its family, for messages."""
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """Tokens of the longest context that the model is made for, RoPE scaling included."""
    layers: list[Layer]
    final_norm: Norm | None
    head: Head | None
    """None where the model gives hidden states only."""
    embedding: Embedding = field(default_factory=Embedding)
    ropes: list[Rope] = field(default_factory=list[Rope])
    causal: bool = True
    """Whether a token sees only those before it and itself."""
    classifier: Classifier | None = None
    text_projections: list[TextProjection] = field(default_factory=list[TextProjection])
    """From a text's pooled hidden state to its embedding, one after the other; none where it is that itself."""
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By role, as `tensors.roles` lists them."""
    prefixes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """A tensor that is not there under its name may have the second of a pair in place of the first before it."""
    stored_as: StoredAs | None = None
    """How the checkpoint stores what it has quantized; None where every weight is plain."""

    @property
    def generates(self) -> bool:
        """Whether it gives logits that a text can be continued by."""
        return self.causal and self.head is not None

    @property
    def embedding_size(self) -> int:
        """Numbers of a text's embedding."""
        return self.text_projections[-1].width if self.text_projections else self.hidden_size

    def to_json(self) -> str:
        """As the native module reads it."""
        return json.dumps(self, default=vars, allow_nan=False)
