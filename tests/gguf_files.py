"""GGUF files for the tests, written byte by byte, so that any part can be invalid."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAGIC = b"GGUF"

# Type ids of metadata values with their struct formats, and the type ids of bools, strings and arrays.
NUMBERS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
BOOL, STRING, ARRAY = 7, 8, 9

F32 = 0


def string(text: str | bytes) -> bytes:
    """Encodes a string: its length, then its bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def number(kind: str, value: float) -> bytes:
    """Encodes a typed number."""
    tag, letter = NUMBERS[kind]
    return struct.pack(f"<I{letter}", tag, value)


def boolean(value: int) -> bytes:
    """Encodes a typed bool, or any byte as a bool."""
    return struct.pack("<IB", BOOL, value)


def text(value: str | bytes) -> bytes:
    """Encodes a typed string."""
    return struct.pack("<I", STRING) + string(value)


def array(tag: int, elements: Sequence[bytes], length: int | None = None) -> bytes:
    """Encodes a typed array; `length` overrides the number of elements in its header."""
    return struct.pack("<IIQ", ARRAY, tag, len(elements) if length is None else length) + b"".join(elements)


@dataclass
class Tensor:
    """A tensor's entry in the header, and its bytes in the file as `data`."""

    name: str | bytes
    dimensions: Sequence[int]
    """Sizes of the dimensions, fastest-varying first."""
    type_id: int = F32
    data: bytes = b""
    offset: int | None = None
    """Offset in the data section, or None for the next aligned offset."""
    dimension_count: int | None = None
    """Length in the header; None for the actual length."""


@dataclass
class File:
    """A GGUF file to be written."""

    keys: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    """Metadata with typed values."""
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = MAGIC
    version: int = 3
    tensor_count: int | None = None
    key_count: int | None = None
    alignment: int = 32
    """Alignment of the data; a file with another `general.alignment` is invalid."""

    def header(self) -> bytes:
        """Returns all bytes before the data section, without padding."""
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        keys = len(self.keys) if self.key_count is None else self.key_count
        out = bytearray(self.magic + struct.pack("<IQQ", self.version, tensors, keys))
        for key, value in self.keys:
            out += string(key) + value
        end = 0
        for tensor in self.tensors:
            count = len(tensor.dimensions) if tensor.dimension_count is None else tensor.dimension_count
            offset = end if tensor.offset is None else tensor.offset
            out += string(tensor.name) + struct.pack(f"<I{len(tensor.dimensions)}Q", count, *tensor.dimensions)
            out += struct.pack("<IQ", tensor.type_id, offset)
            end += len(tensor.data) + -len(tensor.data) % self.alignment
        return bytes(out)

    def bytes(self) -> bytes:
        """Returns the bytes of the whole file."""
        out = bytearray(self.header())
        for tensor in self.tensors:
            out += bytes(-len(out) % self.alignment) + tensor.data
        return bytes(out)

    def write(self, path: Path) -> Path:
        """Writes the file."""
        path.write_bytes(self.bytes())
        return path


def floats(name: str, *values: float) -> Tensor:
    """Returns a tensor that is a vector of float32."""
    return Tensor(name, [len(values)], data=struct.pack(f"<{len(values)}f", *values))
