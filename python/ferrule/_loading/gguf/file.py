"""An open GGUF file: metadata with checked types and limits, and tensor headers."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from ferrule.archs.config import MAX_SIZE, Config
from ferrule.errors import ConfigError

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


class GgufFile:
    """Metadata and tensor headers of a GGUF model in one file or several parts.

    Raises ModelFileError for a malformed file, ConfigError if `general.architecture` is missing.
    """

    def __init__(self, path: Path) -> None:
        from ferrule import _native

        self._file = _native.GgufFile(os.fspath(path))
        self.path = path
        self.metadata = Config(self._file.metadata, path)
        """Metadata by full key, for example `llama.block_count`."""
        self.tensors = self._file.tensors
        """Type and row-major shape of each tensor by name."""
        numbered = (name.split(".", 2) for name in self.tensors if name.startswith("blk."))
        self.in_layers = frozenset(parts[2] for parts in numbered if len(parts) == 3)
        """Tensor names of all layers without the layer index: `attn_q.weight`."""
        self.architecture = self.metadata.text("general.architecture")

    def __contains__(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self.tensors

    def key(self, name: str) -> str:
        """Returns the full key of an architecture's field: `llama.block_count` for `block_count`."""
        return f"{self.architecture}.{name}"

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Returns the shape of a required tensor.

        Raises ConfigError if it is missing.
        """
        if tensor not in self.tensors:
            raise ConfigError(f"{self.path}: tensor {tensor!r} is missing; every model of this architecture has it")
        return self.tensors[tensor][1]

    def rows(self, tensor: str, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """Returns the number of rows of a required matrix, from `low` to `high`.

        Raises ConfigError if it is missing or not a matrix, or has another number of rows.
        """
        shape = self.shape(tensor)
        if len(shape) != 2:
            raise ConfigError(f"{self.path}: tensor {tensor!r} must have 2 dimensions, got shape {list(shape)}")
        if not low <= shape[0] <= high:
            raise ConfigError(f"{self.path}: tensor {tensor!r} must have from {low} to {high} rows, got {shape[0]}")
        return shape[0]

    def factors(self, tensor: str, count: int) -> Sequence[float]:
        """Returns the elements of a tensor of `count` divisors.

        Raises ConfigError for another shape, and for elements that are not finite or not above 0.
        """
        shape = self.shape(tensor)
        if shape != (count,):
            raise ConfigError(f"{self.path}: tensor {tensor!r} must have shape [{count}], got {list(shape)}")
        numbers = struct.unpack(f"<{count}f", self._file.dequantize(tensor))
        for number in numbers:
            if not (math.isfinite(number) and number > 0):
                raise ConfigError(
                    f"{self.path}: elements of tensor {tensor!r} must be finite numbers above 0, got {number}"
                )
        return numbers
