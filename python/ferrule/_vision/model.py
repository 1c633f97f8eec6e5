"""The part of a model that reads images: an image processor, and a vision tower in a separate engine."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from ferrule._cancellation import raise_if_cancelled
from ferrule._vision.images import read_image
from ferrule._vision.processors import ProcessedImage, Processor
from ferrule.errors import ImageError

MAX_IMAGES = 32
"""Maximum number of images of a prompt. Small ones are enlarged, so they need as much memory as large ones."""
KEPT_BYTES = 64 << 20
"""Bytes of features that are kept, since each turn of a conversation has the images of the turns before."""


class Tower(Protocol):
    """A vision tower, which threads share."""

    def features(self, tiles: Sequence[tuple[list[int], bytes]]) -> bytearray:
        """Computes features, float32 `[tokens, width]`, from tiles: places of patches, and the patches."""
        ...

    def close(self) -> None:
        """Frees the tower."""
        ...


class PreparedImage:
    """An image as the model reads it. Its features are computed when needed, and then its pixels are dropped."""

    def __init__(self, processed: ProcessedImage, model: VisionModel) -> None:
        self.text = processed.text
        """Text that takes the place of the image's placeholder in a prompt."""
        self.tokens = processed.tokens
        """Number of tokens of the image."""
        self.model = model
        """Model whose images these are."""
        self._pixels: ProcessedImage | None = processed
        self._features = b""

    def features(self) -> bytes:
        """Returns the features, float32 `[tokens, width]`.

        Raises EngineError, CancelledError.
        """
        pixels = self._pixels
        if pixels is not None:
            self._features = self.model.features(pixels)
            self._pixels = None
        return self._features


class VisionModel:
    """Reads images for a language model."""

    def __init__(self, processor: Processor, tower: Tower) -> None:
        self.processor = processor
        self._tower = tower
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[tuple[int, ...], bytes], bytes] = OrderedDict()
        _models.add(self)

    def prepare(self, given: Iterable[tuple[object, str]], limit: int) -> list[PreparedImage]:
        """Reads and processes the images of a prompt, each with the name of its field for error messages.

        Prepared images are returned unchanged. Images are processed one after another, so that those beyond the
        limits cost nothing: `limit` tokens, and MAX_IMAGES.

        Raises ImageError.
        """
        prepared: list[PreparedImage] = []
        tokens = 0
        for image, field in given:
            raise_if_cancelled()
            if len(prepared) == MAX_IMAGES:
                raise ImageError(f"{field} must be absent: a prompt can have {MAX_IMAGES} images", field=field)
            one = image
            if not isinstance(one, PreparedImage):
                one = PreparedImage(self.processor.process(read_image(one, field)), self)
            elif one.model is not self:
                raise ImageError(f"{field} must be prepared by this model, not by another one", field=field)
            tokens += one.tokens
            if tokens > limit:
                raise ImageError(
                    f"{field} must be absent: with it the images have {tokens} tokens, and a prompt can have {limit}",
                    field=field,
                )
            prepared.append(one)
        return prepared

    def features(self, processed: ProcessedImage) -> bytes:
        """Computes the features of an image, float32 `[tokens, width]`, or returns those of an equal image.

        Raises EngineError, CancelledError.
        """
        patches = processed.patches
        key = patches.shape, blake2b(patches.tobytes()).digest()
        with self._lock:
            rows = self._kept.pop(key, None)
        if rows is None:
            raise_if_cancelled()
            places = [int(place) for place in processed.positions]
            rows = bytes(self._tower.features([(places, tile.tobytes()) for tile in patches]))
        with self._lock:
            self._kept[key] = rows
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return rows

    def after_fork(self) -> None:
        """Replaces the lock in a forked child, where a thread that holds it no longer exists."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Frees the tower."""
        self._tower.close()


def _after_fork() -> None:
    for model in list(_models):
        model.after_fork()


_models: weakref.WeakSet[VisionModel] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
