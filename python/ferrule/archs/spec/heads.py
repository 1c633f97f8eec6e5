"""Heads: from the hidden states to logits, labels or the embedding of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ferrule.archs.spec.activation import Activation
from ferrule.archs.spec.norms import Norm


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
