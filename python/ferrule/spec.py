"""A model as data: everything that tells one architecture from another, and which stored tensor plays which role.

`archs/` write it from config.json; the native module reads its JSON, refuses switches that it does not know, and
runs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * (weight + weight_offset)."""

    eps: float
    weight_offset: float = 0.0
    type: Literal["rms"] = "rms"


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / std * weight + bias."""

    eps: float
    type: Literal["layer"] = "layer"


Norm: TypeAlias = RmsNorm | LayerNorm


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


Scaling: TypeAlias = NoScaling | LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding."""

    theta: float
    rotary_dim: int
    """Leading elements of a head that are turned."""
    interleaved: bool = False
    """Pairs are neighbours (GPT-J), not element i and i + rotary_dim / 2 (Llama)."""
    scaling: Scaling = field(default_factory=NoScaling)


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped queries."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    """Factor on the scores."""
    window: int | None
    """Positions that a row sees, its own among them; None for all."""
    rope: int | None
    """Index in ModelSpec.ropes; None for no rotation."""
    qkv_bias: bool
    output_bias: bool
    qk_norm: RmsNorm | None
    """Over each query and key head, before the rotation."""


@dataclass(frozen=True)
class GatedFfn:
    """down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation
    bias: bool
    type: Literal["gated"] = "gated"


@dataclass(frozen=True)
class Layer:
    """x += attention(norm(x)); x += ffn(norm(x))."""

    attention_norm: Norm
    attention: Attention
    ffn_norm: Norm
    ffn: GatedFfn


@dataclass(frozen=True)
class Head:
    """From hidden states to logits."""

    tied: bool
    """Whether the matrix is the embedding's."""
    bias: bool = False


@dataclass(frozen=True)
class TensorName:
    """Where a role's weights lie in the checkpoint."""

    name: str


@dataclass(frozen=True)
class ModelSpec:
    """A model, completely."""

    architecture: str
    """Its family, for messages."""
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """Tokens of the longest context that the model is made for, RoPE scaling included."""
    ropes: list[Rope]
    layers: list[Layer]
    final_norm: Norm
    head: Head
    tensors: dict[str, TensorName] = field(default_factory=dict[str, TensorName])
    """By role, as `roles` lists them."""

    def roles(self) -> Iterator[str]:
        """Every tensor that this model needs, as its switches say."""
        yield "embedding.weight"
        for index, layer in enumerate(self.layers):
            at = f"layers.{index}"
            yield from _norm_roles(f"{at}.attention_norm", layer.attention_norm)
            for projection in ("q", "k", "v"):
                yield from _projection_roles(f"{at}.attention.{projection}", bias=layer.attention.qkv_bias)
            yield from _projection_roles(f"{at}.attention.output", bias=layer.attention.output_bias)
            if layer.attention.qk_norm is not None:
                yield f"{at}.attention.q_norm.weight"
                yield f"{at}.attention.k_norm.weight"
            yield from _norm_roles(f"{at}.ffn_norm", layer.ffn_norm)
            for projection in ("gate", "up", "down"):
                yield from _projection_roles(f"{at}.ffn.{projection}", bias=layer.ffn.bias)
        yield from _norm_roles("final_norm", self.final_norm)
        if not self.head.tied:
            yield "head.weight"
        if self.head.bias:
            yield "head.bias"

    def to_json(self) -> str:
        """As the native module reads it."""
        return json.dumps(asdict(self), allow_nan=False)


def tensors_named(spec: ModelSpec, modules: Mapping[str, str]) -> dict[str, TensorName]:
    """The checkpoint's tensor for each role of `spec`.

    `modules` maps a role without its `layers.N.` and `.weight` to the checkpoint's module, in which `{layer}` stands
    for the layer's index: `{"attention.q": "model.layers.{layer}.self_attn.q_proj"}`.
    """
    tensors: dict[str, TensorName] = {}
    for role in spec.roles():
        module, parameter = role.rsplit(".", 1)
        layer = ""
        if module.startswith("layers."):
            _, layer, module = module.split(".", 2)
        tensors[role] = TensorName(f"{modules[module].format(layer=layer)}.{parameter}")
    return tensors


def _norm_roles(at: str, norm: Norm) -> Iterator[str]:
    yield f"{at}.weight"
    if isinstance(norm, LayerNorm):
        yield f"{at}.bias"


def _projection_roles(at: str, *, bias: bool) -> Iterator[str]:
    yield f"{at}.weight"
    if bias:
        yield f"{at}.bias"
