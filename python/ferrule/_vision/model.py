"""The part of a model that reads images: an image processor, and a vision tower in a separate engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from ferrule._vision.images import read_image
from ferrule._vision.processors import ProcessedImage, Processor

if TYPE_CHECKING:
    from ferrule import _native

KEPT_BYTES = 64 << 20
"""Bytes of features that are kept, since each turn of a conversation has the images of the turns before."""


class PreparedImage:
    """An image as the model reads it. Its features are computed when they are needed, and kept."""

    def __init__(self, processed: ProcessedImage, model: VisionModel) -> None:
        self.processed = processed
        self._model = model

    def features(self) -> bytes:
        """Returns the features, float32 `[tokens, width]`.

        Raises EngineError.
        """
        return self._model.features(self.processed)


class VisionModel:
    """Reads images for a language model."""

    def __init__(self, processor: Processor, tower: _native.Engine) -> None:
        self.processor = processor
        self._tower = tower
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[tuple[int, ...], bytes], bytes] = OrderedDict()

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
        key = patches.shape, blake2b(patches.tobytes()).digest()
        with self._lock:  # two requests with the same image compute it once
            rows = self._kept.pop(key, None)
            if rows is None:
                places = [int(place) for place in processed.positions]
                rows = bytes(self._tower.features([(places, tile.tobytes()) for tile in patches]))
            self._kept[key] = rows
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return rows

    def close(self) -> None:
        """Frees the tower."""
        self._tower.close()
