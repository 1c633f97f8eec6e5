"""A GGUF file, opened: its metadata with types and limits, and what is known of its tensors."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from ferrule.archs.config import Config
from ferrule.errors import ConfigError

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file: its name says so."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


class GgufFile:
    """The metadata and the tensors' headers of a model's file, or of all parts of one.

    Raises ModelFileError where it is malformed, ConfigError where it names no architecture.
    """

    def __init__(self, path: Path) -> None:
        from ferrule import _native

        self._file = _native.GgufFile(os.fspath(path))
        self.path = path
        self.metadata = Config(self._file.metadata, path)
        """By whole keys, `llama.block_count`: errors name them."""
        self.tensors = self._file.tensors
        """Type and shape, row-major, by name."""
        numbered = (name.split(".", 2) for name in self.tensors if name.startswith("blk."))
        self.in_layers = frozenset(parts[2] for parts in numbered if len(parts) == 3)
        """The names that tensors of any layer have, without its number: `attn_q.weight`."""
        self.architecture = self.metadata.text("general.architecture")

    def __contains__(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""
        return tensor in self.tensors

    def key(self, name: str) -> str:
        """The whole key of one that belongs to the architecture: `llama.block_count` for `block_count`."""
        return f"{self.architecture}.{name}"

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor that there must be.

        Raises ConfigError where there is none.
        """
        if tensor not in self.tensors:
            raise ConfigError(f"{self.path}: has no tensor {tensor!r}, which every model of its architecture has")
        return self.tensors[tensor][1]

    def factors(self, tensor: str, count: int) -> Sequence[float]:
        """The numbers of a tensor of `count` divisors.

        Raises ConfigError for another shape, and for what nothing can be divided by.
        """
        shape = self.shape(tensor)
        if shape != (count,):
            raise ConfigError(f"{self.path}: tensor {tensor!r} has the shape {list(shape)}; it must be [{count}]")
        numbers = struct.unpack(f"<{count}f", self._file.dequantize(tensor))
        for number in numbers:
            if not (math.isfinite(number) and number > 0):
                raise ConfigError(f"{self.path}: tensor {tensor!r} holds {number}; it must hold finite numbers above 0")
        return numbers
