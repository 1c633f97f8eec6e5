"""Several residual streams, and the blocks that run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ferrule.archs.spec.norms import Norm


@dataclass(frozen=True)
class Alternating:
    """Alternating updates (AltUp): blocks run on one stream; the others are predicted, then corrected by its result.

    Baykal et al. 2023.
    """

    active: int
    """Stream that the blocks run on."""
    norm: Norm
    """Norm of the router's input."""
    clip: float | None = None
    """Largest magnitude of the weights that the correction's coefficients are computed with."""
    type: Literal["alternating"] = "alternating"


@dataclass(frozen=True)
class Side:
    """The blocks read one stream, and are added to all streams but the first."""

    from_stream: int
    scaled: bool = False
    """Whether the stream is multiplied by a stored vector."""
    type: Literal["side"] = "side"


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of a layer that run on one of several residual streams."""

    name: str
    """Name in roles: span "altup" has `layers.0.altup.router.weight`."""
    blocks: int
    """Number of blocks."""
    mix: Alternating | Side


@dataclass(frozen=True)
class ProjectedEnds:
    """Streams but the first begin as projections of the embedding, and are projected back before the mean of all.

    Each projection is scaled to the magnitude of the first stream.
    """

    min_square: float
    """Smallest mean square of a projection that is scaled."""
    type: Literal["projected"] = "projected"


@dataclass(frozen=True)
class Streams:
    """Residual streams of a model that has several."""

    count: int
    ends: ProjectedEnds
    """Beginning of the streams before the first layer, and their end after the last."""
