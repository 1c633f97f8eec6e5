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
class Gated:
    """Gated hyper-connection: a gated mean of all normed streams is read, and the output is added to each stream.

    With n all normed streams, the gates are sigmoid(up(silu(down(n) / count))), and the factors of the output
    2 * sigmoid(inject(n) / count), one per stream (Qwen4).
    """

    norm: Norm
    """Norm of each stream, which has its own weight."""
    rank: int
    """Rank of the projection to the gates."""
    type: Literal["gated"] = "gated"


@dataclass(frozen=True)
class Weighted:
    """Weighted sum of all streams, with weights sigmoid(scale * mix(n) + base) + eps.

    Here n is all streams of a token side by side, normed together.
    """

    norm: Norm
    """Norm of all streams of a token together."""
    eps: float
    """Number added to each weight."""
    type: Literal["weighted"] = "weighted"


@dataclass(frozen=True)
class Sinkhorn:
    """Manifold-constrained hyper-connection: streams are mixed by a matrix whose rows and columns sum to one.

    A weighted sum of all streams is read, and the output is added to each with its own factor (DeepSeek-V4).
    """

    norm: Norm
    """Norm of all streams of a token together."""
    eps: float
    """Number added to each weight of the sum, to the elements of the matrix and to their sums."""
    iterations: int
    """Number of times that the columns of the matrix are divided by their sums."""
    type: Literal["sinkhorn"] = "sinkhorn"


@dataclass(frozen=True)
class Joined:
    """The blocks run on all streams side by side; they have no norms."""

    type: Literal["joined"] = "joined"


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of a layer that run on one of several residual streams, or on all of them."""

    name: str
    """Name in roles: span "altup" has `layers.0.altup.router.weight`."""
    blocks: int
    """Number of blocks."""
    mix: Alternating | Side | Gated | Sinkhorn | Joined


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
    ends: ProjectedEnds | Gated | Weighted
    """Beginning of the streams before the first layer, and their end after the last. With `Gated`, all begin as the
    embedding, and their gated mean is the end; with `Weighted`, their weighted sum."""
