"""The slopes of ALiBi (Press et al. 2022)."""

from __future__ import annotations


def alibi_slopes(heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Returns a geometric sequence from 2^-(largest / n) to 2^-largest, where n is the next power of two >= heads.

    For fewer than n heads, the slopes of n / 2 heads come first, then those between them.
    """
    power = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-largest * (index + 1) / power) for index in range(power)]
    return tuple((slopes if power == heads else slopes[1::2] + slopes[::2])[:heads])
