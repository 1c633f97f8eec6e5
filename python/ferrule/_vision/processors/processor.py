"""Interface of the processors of images, which are one file for each family of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


@dataclass(frozen=True)
class ProcessedImage:
    """An image in the form that a vision tower reads, with its text in the prompt."""

    text: str
    """Text that replaces the image's placeholder in the prompt."""
    patches: NDArray[np.float32]
    """Normalized pixels [tiles, patches, 3 * patch_size * patch_size]; a patch is in the order channel, row, column.

    Patches whose hidden states the model joins to one token are consecutive."""
    positions: NDArray[np.uint32]
    """Rows of the tower's position table [patches], the same for all tiles."""
    tokens: int
    """Number of image tokens in the text of the image."""


class Processor(Protocol):
    """Prepares the images of a model."""

    @property
    def placeholder(self) -> str:
        """Text of an image in a rendered conversation, before it is replaced."""
        ...

    @property
    def image_token_id(self) -> int:
        """Token whose embeddings the features of images replace."""
        ...

    def process(self, image: Image) -> ProcessedImage:
        """Prepares an image in mode RGB, as `read_image` returns it."""
        ...
