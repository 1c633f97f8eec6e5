"""The spec of a whole model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ferrule.archs.spec.embedding import Embedding, Table
from ferrule.archs.spec.heads import Classifier, LmHead, TextProjection
from ferrule.archs.spec.layer import Layer
from ferrule.archs.spec.norms import Norm
from ferrule.archs.spec.rope import Rope
from ferrule.archs.spec.stored import StoredAs, Tensor
from ferrule.archs.spec.streams import Streams


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
    streams: Streams | None = None
    """Residual streams, if there are several."""
    tables: list[Table] = field(default_factory=list[Table])
    """Tables that mixers look up tokens in."""
    causal: bool = True
    """Whether a token attends only to itself and earlier tokens."""
    classifier: Classifier | None = None
    text_projections: list[TextProjection] = field(default_factory=list[TextProjection])
    """Projections from the pooled hidden state to the embedding, applied in order."""
    merged_rows: int = 1
    """Number of consecutive hidden states that are joined to one input of the projections."""
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
