"""Rotary position embeddings, and the scalings of their frequencies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias


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
    long_attention_factor: float | None = None
    """Factor on cosine and sine beyond the original context length; None for `attention_factor`."""
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
