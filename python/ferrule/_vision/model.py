"""The part of a model that reads images: an image processor, and a vision tower in an engine of its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from ferrule._vision.images import read_image
from ferrule._vision.processors import ProcessedImage, Processor

if TYPE_CHECKING:
    from ferrule import _native

KEPT_IMAGES = 32
"""Number of images whose features are kept, since each turn of a conversation has those of the turns before."""


class Features(NamedTuple):
    """Features of an image, in place of the embeddings of consecutive tokens."""

    first: int
    """Position of the first token."""
    tokens: int
    rows: bytes
    """float32 `[tokens, width]`."""


class PreparedImage:
    """An image as the model reads it. Its features are computed when they are needed, and kept."""

    def __init__(self, processed: ProcessedImage, model: VisionModel) -> None:
        self.text = processed.text
        """Text that takes the place of the image's placeholder in a prompt."""
        self.tokens = processed.tokens
        """Number of tokens of the image."""
        self._processed = processed
        self._model = model

    def features(self) -> bytes:
        """Returns the features, float32 `[tokens, width]`.

        Raises EngineError.
        """
        return self._model.features(self._processed)


class VisionModel:
    """Reads images for a language model."""

    def __init__(self, processor: Processor, tower: _native.Engine) -> None:
        self.processor = processor
        self._tower = tower
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def prepare(self, given: object, field: str) -> PreparedImage:
        """Reads and processes an image; `field` names it in error messages. A prepared image is returned unchanged.

        Raises ImageError.
        """
        if isinstance(given, PreparedImage):
            return given
        return PreparedImage(self.processor.process(read_image(given, field)), self)

    def features(self, processed: ProcessedImage) -> bytes:
        """Computes the features of an image, float32 `[tokens, width]`, or returns those of an equal image.

        Raises EngineError.
        """
        patches = processed.patches
        key = blake2b(patches.tobytes(), digest_size=32, person=str(patches.shape[0]).encode()[:16]).digest()
        with self._lock:  # two requests with the same image compute it once
            rows = self._kept.pop(key, None)
            if rows is None:
                places = [int(place) for place in processed.positions]
                rows = bytes(self._tower.features([(places, tile.tobytes()) for tile in patches]))
            self._kept[key] = rows
            while len(self._kept) > KEPT_IMAGES:
                self._kept.popitem(last=False)
        return rows

    def close(self) -> None:
        """Frees the tower."""
        self._tower.close()


def placed(images: Sequence[PreparedImage], token_ids: Sequence[int], image_token_id: int) -> list[Features] | None:
    """Returns the features of images at the places of their tokens; None if the numbers of tokens differ."""
    places = [place for place, token in enumerate(token_ids) if token == image_token_id]
    if len(places) != sum(image.tokens for image in images):
        return None
    features: list[Features] = []
    first = 0
    for image in images:
        rows = image.features()
        width = len(rows) // image.tokens
        # Tokens between the tiles of an image divide its features.
        of_image = places[first : first + image.tokens]
        start = 0
        for index in range(1, image.tokens + 1):
            if index == image.tokens or of_image[index] != of_image[index - 1] + 1:
                features.append(Features(of_image[start], index - start, rows[start * width : index * width]))
                start = index
        first += image.tokens
    return features
