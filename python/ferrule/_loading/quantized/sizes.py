"""Fields that several quantization methods share: bits, group size and block shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ferrule.archs.config import MAX_SIZE, Config


def bits_among(config: Config, field: str, known: Sequence[int]) -> int:
    """Reads the bits of a code, one of `known`.

    Raises ConfigError, UnsupportedModelError for other bits.
    """
    bits = config.integer(field, high=64)
    if bits not in known:
        raise config.unsupported(field, " or ".join(map(str, known)))
    return bits


def group_size(config: Config, field: str) -> int | None:
    """Reads the group size; None for a whole row, which the file writes as -1.

    Raises ConfigError.
    """
    if config.values.get(field) == -1:
        return None
    if field in config and config.values[field] == 0:
        raise config.error(field, f"-1, or an integer from 1 to {MAX_SIZE}")
    return config.integer(field)


def block(config: Config, field: str) -> tuple[int, int] | None:
    """Reads the block shape [outputs, inputs]; None if the field is missing.

    Raises ConfigError.
    """
    value: object = config.values.get(field)
    if value is None:
        return None
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    sizes = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= MAX_SIZE]
    if len(sizes) != 2 or len(numbers) != 2:
        raise config.error(field, f"a list of two integers from 1 to {MAX_SIZE}")
    return sizes[0], sizes[1]
