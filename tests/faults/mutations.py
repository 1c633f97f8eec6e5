"""Random damage to files: to their bytes, and to the structure of JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

INTEGERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)
"""Values at the limits of integer types, written as sizes, counts and offsets."""
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    7,
    1 << 31,
    1 << 64,
    1e308,
    "",
    "x",
    "\ud800",
    "é" * 40,
    "a" * 100_000,
    [],
    {},
    [[[]]],
    {"type": "Sequence"},
)
"""JSON values that replace others."""


def damaged_bytes(data: bytes, random: Random, header: int) -> bytes:
    """Returns the bytes with one to three changes, most of them in the first `header` bytes."""
    damaged = bytearray(data)
    for _ in range(random.randint(1, 3)):
        size = max(min(len(damaged), header if random.random() < 0.8 else len(damaged)), 1)
        random.choice(BYTE_CHANGES)(damaged, random.randrange(size), random)
    return bytes(damaged)


def damaged_json(document: Any, random: Random) -> bytes:
    """Returns a JSON document with one to three changes of its structure, or of its text."""
    document = deepcopy(document)
    for _ in range(random.randint(1, 3)):
        parents = list(_containers(document))
        if parents:
            _change_member(random.choice(parents), random)
    text = json.dumps(document).encode()
    return damaged_bytes(text, random, len(text)) if random.random() < 0.1 else text


def _flip(data: bytearray, at: int, random: Random) -> None:
    if data:
        data[at] ^= 1 << random.randrange(8)


def _put_integer(data: bytearray, at: int, random: Random) -> None:
    letter, size = random.choice((("B", 1), ("H", 2), ("I", 4), ("Q", 8)))
    data[at : at + size] = struct.pack(f"<{letter}", random.choice(INTEGERS) % (1 << 8 * size))


def _truncate(data: bytearray, at: int, _: Random) -> None:
    del data[at:]


def _remove(data: bytearray, at: int, random: Random) -> None:
    del data[at : at + random.randint(1, 64)]


def _repeat(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = data[at : at + random.randint(1, 64)] * random.randint(1, 4)


def _overwrite(data: bytearray, at: int, random: Random) -> None:
    size = random.randint(1, 64)
    data[at : at + size] = random.randbytes(size)


BYTE_CHANGES: tuple[Callable[[bytearray, int, Random], None], ...] = (
    _flip,
    _put_integer,
    _truncate,
    _remove,
    _repeat,
    _overwrite,
)


def _containers(node: Any) -> list[Any]:
    """Returns every non-empty list and object. Only the first members of a long container are searched."""
    if not isinstance(node, (dict, list)) or not node:
        return []
    members = list(node.values() if isinstance(node, dict) else node)[:64]
    return [node, *(found for member in members for found in _containers(member))]


def _change_member(parent: Any, random: Random) -> None:
    key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    change = random.randrange(5)
    if change == 0:
        del parent[key]
    elif change == 1:
        parent[key] = deepcopy(random.choice(VALUES))
    elif change == 2:
        parent[key] = [deepcopy(parent[key]) for _ in range(random.choice((2, 40)))]
    elif change == 3:
        chain = [deepcopy(parent[key]) for _ in range(3)]
        parent[key] = {"type": "Sequence", "normalizers": chain, "decoders": deepcopy(chain)}
    elif isinstance(parent, dict):
        parent[random.choice(("type", "content", "pattern", "vocab", "x"))] = deepcopy(parent[key])
    else:
        parent.append(deepcopy(parent[key]))
