"""Layers and their residual blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from ferrule.archs.spec.attention import Attention
from ferrule.archs.spec.compressed import CompressedAttention
from ferrule.archs.spec.feed_forward import Dense, Experts
from ferrule.archs.spec.norms import Norm
from ferrule.archs.spec.recurrent import (
    DeltaNet,
    LightningAttention,
    Mamba,
    Mamba2,
    NgramEmbedding,
    RecurrentMixer,
    RgLru,
    RwkvChannelMix,
    RwkvTimeMix,
    ShortConvolution,
)
from ferrule.archs.spec.streams import Span
from ferrule.archs.spec.tokenwise import Laurel, PerLayerEmbedding, Projection

Mixer: TypeAlias = (
    Attention | CompressedAttention | Dense | Experts | RecurrentMixer | PerLayerEmbedding | Projection | Laurel
)
"""Function of a residual block from its normed input to what it adds to the stream."""


AnyMixer = TypeVar(
    "AnyMixer",
    Attention,
    CompressedAttention,
    Dense,
    Experts,
    ShortConvolution,
    DeltaNet,
    LightningAttention,
    Mamba,
    Mamba2,
    NgramEmbedding,
    PerLayerEmbedding,
    Projection,
    Laurel,
    RgLru,
    RwkvTimeMix,
    RwkvChannelMix,
)


@dataclass(frozen=True)
class LowRank:
    """Low-rank addition (x A^T) B^T to neighbouring outputs of a linear layer; roles are `low_rank.N.a` and `.b`."""

    outputs: tuple[str, ...]
    """Roles of the outputs within the block."""
    rank: int


@dataclass(frozen=True)
class Block:
    """Residual block: x = sum_norm(stream_scale * x + residual_scale * post_norm(mixer(input_scale * norm(x))))."""

    name: str
    """Name in roles: block "ffn" has `layers.0.ffn.down.weight`, and `layers.0.ffn_norm.weight` for its norm."""
    mixer: Mixer
    norm: Norm | None = None
    """Norm of the mixer's input."""
    post_norm: Norm | None = None
    """Norm of the mixer's output."""
    sum_norm: Norm | None = None
    """Norm after the output is added to the residual stream."""
    joint_norm: Norm | None = None
    """Norm of the sum of the outputs of this block and of the blocks that are parallel to it."""
    input: Literal["stream", "stream_and_embedding", "output", "stream_plus_output"] = "stream"
    """Input of the block: the residual stream; the stream joined with the embedding; the output of the block before;
    or the sum of stream and output. An output that the next block reads is not added to the stream."""
    weights_of: int | None = None
    """Earlier layer whose block of the same name has the weights of this one, except those of `low_rank`."""
    low_rank: tuple[LowRank, ...] = ()
    """Additions to the linear layers of the mixer."""
    parallel: bool = False
    """Whether the block reads the same residual stream as the block before it; without a norm of its own it then reads
    that block's normed input."""
    input_scale: float = 1.0
    """Factor on the mixer's input."""
    residual_scale: float = 1.0
    """Factor on the mixer's output."""
    stream_scale: float = 1.0
    """Factor on what the output is added to."""
    residual_after_norm: bool = False
    """Whether the output is added to the normed input rather than the input."""


@dataclass(frozen=True)
class Layer:
    """Residual blocks, which run in order."""

    blocks: tuple[Block, ...]
    spans: tuple[Span, ...] = ()
    """In a model with several residual streams: the spans that the blocks belong to."""
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
