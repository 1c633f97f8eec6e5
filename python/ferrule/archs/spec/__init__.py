"""Model specs: an architecture as data, and the checkpoint tensor of each role.

The files in `archs/` make a spec from config.json. The native module reads it as JSON, refuses unknown switches, and
runs it.
"""

from ferrule.archs.spec.activation import Activation, Clamp, Xielu
from ferrule.archs.spec.attention import Attention, HeadProjections, Indexer, LatentProjections, QueryGrowth
from ferrule.archs.spec.embedding import Embedding, LearnedPositions, SinusoidalPositions, Table
from ferrule.archs.spec.feed_forward import Dense, Experts, Ffn, Router
from ferrule.archs.spec.heads import Classifier, LmHead, Pooling, TextProjection
from ferrule.archs.spec.layer import AnyMixer, Block, Layer, LowRank, Mixer
from ferrule.archs.spec.model import ModelSpec
from ferrule.archs.spec.norms import HeadNorm, LayerNorm, Norm, RmsNorm
from ferrule.archs.spec.recurrent import (
    Decay,
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
from ferrule.archs.spec.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from ferrule.archs.spec.stored import (
    Awq,
    BitsAndBytes,
    CompressedTensors,
    CompressedWeights,
    Fp8,
    Gptq,
    Mxfp4,
    Part,
    Stack,
    StoredAs,
    Tensor,
)
from ferrule.archs.spec.streams import Alternating, Gated, Joined, ProjectedEnds, Side, Span, Streams
from ferrule.archs.spec.tokenwise import Laurel, PerLayerEmbedding, Projection

__all__ = [
    "Activation",
    "Alternating",
    "AnyMixer",
    "Attention",
    "Awq",
    "BitsAndBytes",
    "Block",
    "Clamp",
    "Classifier",
    "CompressedTensors",
    "CompressedWeights",
    "Decay",
    "DeltaNet",
    "Dense",
    "DynamicScaling",
    "Embedding",
    "Experts",
    "Ffn",
    "Fp8",
    "Gated",
    "Gptq",
    "HeadNorm",
    "HeadProjections",
    "Indexer",
    "Joined",
    "LatentProjections",
    "Laurel",
    "Layer",
    "LayerNorm",
    "LearnedPositions",
    "LightningAttention",
    "LinearScaling",
    "Llama3Scaling",
    "LmHead",
    "LongRopeScaling",
    "LowRank",
    "Mamba",
    "Mamba2",
    "Mixer",
    "ModelSpec",
    "Mxfp4",
    "NgramEmbedding",
    "NoScaling",
    "Norm",
    "Part",
    "PerLayerEmbedding",
    "Pooling",
    "ProjectedEnds",
    "Projection",
    "ProportionalScaling",
    "QueryGrowth",
    "RecurrentMixer",
    "RgLru",
    "RmsNorm",
    "Rope",
    "Router",
    "RwkvChannelMix",
    "RwkvTimeMix",
    "Scaling",
    "ShortConvolution",
    "Side",
    "SinusoidalPositions",
    "Span",
    "Stack",
    "StoredAs",
    "Streams",
    "Table",
    "Tensor",
    "TextProjection",
    "Xielu",
    "YarnScaling",
]
