"""Candidate weight formats: each returns a matrix [outputs, inputs] as the kernel would read it.

A format is a value with its stored bits per weight and `apply`. Groups run along the inputs. Searches minimize the
squared error of each group, by default unweighted, because a model is loaded without calibration data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tiny_llama import Floats

SUPER = 256
"""Inputs that share one f32 scale: one floating-point FMA in the kernel."""

IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The sixteen levels of llama.cpp's IQ4_NL."""

Weighting = Callable[[Floats], Floats]


def plain(groups: Floats) -> Floats:
    """Unweighted: all errors have equal importance."""
    return np.ones_like(groups[..., :1])


def by_square(groups: Floats) -> Floats:
    """Importance of each error: the square of the weight."""
    return groups * groups


def by_magnitude(groups: Floats) -> Floats:
    """Importance weights of llama.cpp without an importance matrix: the group's rms plus the weight's magnitude."""
    return np.sqrt(np.mean(groups * groups, axis=-1, keepdims=True)) + np.abs(groups)


def _half(x: Floats) -> Floats:
    """Round to f16 and convert back."""
    return x.astype(np.float16).astype(np.float32)


def _peak(groups: Floats) -> Floats:
    """The element of largest magnitude of each group, with its sign, last axis kept."""
    at = np.abs(groups).argmax(axis=-1)[..., None]
    return np.take_along_axis(groups, at, axis=-1)


def _divide(a: Floats, b: Floats) -> Floats:
    """Divide `a` by `b`; the result is 0 where `b` is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


class Grid:
    """Sixteen (or more) levels to which a scaled weight is rounded."""

    def __init__(self, levels: Floats) -> None:
        self.levels = levels.astype(np.float32)
        self.edges = (self.levels[1:] + self.levels[:-1]) / 2
        steps = np.diff(self.levels)
        self.uniform = bool(np.all(steps == 1) and self.levels[0] % 1 == 0)

    def snap(self, x: Floats) -> Floats:
        """The nearest level of each element."""
        if self.uniform:
            return np.clip(np.rint(x), self.levels[0], self.levels[-1])
        return self.levels[np.searchsorted(self.edges, x)]


def linear(bits: int) -> Grid:
    """Levels of two's complement integers: -8..7 for 4 bits."""
    return Grid(np.arange(-(1 << (bits - 1)), 1 << (bits - 1), dtype=np.float32))


def symmetric(bits: int) -> Grid:
    """Symmetric integer levels: -7..7 for 4 bits, with one code unused."""
    return Grid(np.arange(1 - (1 << (bits - 1)), 1 << (bits - 1), dtype=np.float32))


def search_scale(groups: Floats, grid: Grid, importance: Floats, ratios: NDArray[np.float64], signed: bool) -> Floats:
    """The scale of each group with the least weighted squared error, refined by least squares; last axis 1.

    `ratios` are tried shares of the scale that maps the peak onto the last level; with `signed`, a scale may be
    negative.
    """
    peak = _peak(groups) if signed else np.abs(_peak(groups))
    base: Floats = peak / np.float32(grid.levels[0] if signed else grid.levels[-1])
    best = base
    best_gain = np.full(peak.shape, -1, np.float32)
    for ratio in ratios:
        codes = grid.snap(_divide(groups, base * np.float32(ratio)))
        norm = np.sum(importance * codes * codes, axis=-1, keepdims=True)
        dot = np.sum(importance * codes * groups, axis=-1, keepdims=True)
        gain = _divide(dot * dot, norm)
        best = np.where(gain > best_gain, _divide(dot, norm), best)
        best_gain = np.maximum(gain, best_gain)
    return best


NO_SEARCH = np.array([1.0])
SEARCH = np.linspace(0.62, 1.15, 15)


@dataclass(frozen=True)
class Format:
    """A way to store a matrix."""

    name: str
    bits: float
    apply: Callable[[Floats], Floats] = field(repr=False)

    def bytes(self, weights: int) -> int:
        """Bytes needed to store the given number of weights."""
        return int(weights * self.bits / 8)


@dataclass(frozen=True)
class GroupScale:
    """Codes times one f16 scale per group (Q4_0, Q8_0, IQ4_NL and their relatives)."""

    group: int
    grid: Grid
    ratios: NDArray[np.float64] = field(default_factory=lambda: NO_SEARCH)
    weighting: Weighting = plain
    signed: bool = True
    scale_in_f32: bool = False

    def __call__(self, matrix: Floats) -> Floats:
        """Quantize and read back."""
        groups = matrix.reshape(matrix.shape[0], -1, min(self.group, matrix.shape[1]))
        if self.ratios is NO_SEARCH:
            peak = _peak(groups) if self.signed else np.abs(_peak(groups))
            scale = peak / (self.grid.levels[0] if self.signed else self.grid.levels[-1])
        else:
            scale = search_scale(groups, self.grid, self.weighting(groups), self.ratios, self.signed)
        if not self.scale_in_f32:
            scale = _half(scale)
        return (self.grid.snap(_divide(groups, scale)) * scale).reshape(matrix.shape)


@dataclass(frozen=True)
class SubScales:
    """Codes times an integer sub-scale per group and one f16 scale per super-block of 256.

    code x sub-scale fits 8 bits, so that a GEMM multiplies plain int8 and scales once per super-block.
    """

    group: int
    grid: Grid
    scales: Grid
    weighting: Weighting = plain
    steps: NDArray[np.float64] = field(default_factory=lambda: np.linspace(0.80, 1.12, 9))
    super_block: int = SUPER

    def __call__(self, matrix: Floats) -> Floats:
        """Quantize and read back."""
        wide = min(self.super_block, matrix.shape[1])
        groups = matrix.reshape(matrix.shape[0], -1, wide // self.group, self.group)
        importance = self.weighting(groups)
        levels = self.scales.levels
        ideal = search_scale(groups, self.grid, importance, SEARCH, signed=bool(levels[0] < 0))
        top = np.abs(ideal).max(axis=-2, keepdims=True) / np.float32(np.abs(levels).max())
        best = np.zeros_like(groups)
        best_error = np.full(top.shape, np.inf, np.float32)
        for step in self.steps:
            unit = _half(top * np.float32(step))
            nearest = np.searchsorted(self.scales.edges, _divide(ideal, unit))
            chosen = np.zeros_like(groups)
            error = np.full(ideal.shape, np.inf, np.float32)
            for offset in (-1, 0, 1):
                scale = levels[np.clip(nearest + offset, 0, len(levels) - 1)] * unit
                trial = self.grid.snap(_divide(groups, scale)) * scale
                miss = np.sum(importance * (trial - groups) ** 2, axis=-1, keepdims=True)
                chosen = np.where(miss < error, trial, chosen)
                error = np.minimum(miss, error)
            total = error.sum(axis=-2, keepdims=True)
            best = np.where(total < best_error, chosen, best)
            best_error = np.minimum(total, best_error)
        return best.reshape(matrix.shape)


def integers(*values: int) -> Grid:
    """Levels by name."""
    return Grid(np.array(values, np.float32))


def up_to(largest: int) -> Grid:
    """Sub-scales 0..largest."""
    return integers(*range(largest + 1))


def either_sign(*values: int) -> Grid:
    """Return sub-scales of these magnitudes with both signs."""
    return integers(*(-v for v in reversed(values)), *values)


def q6_k(matrix: Floats) -> Floats:
    """llama.cpp's Q6_K: codes of 6 bits, int8 sub-scales per 16 weights, one f16 scale per super-block: 6.5625 bits."""
    return SubScales(16, linear(6), either_sign(*range(1, 128)), by_square, steps=np.array([1.0]))(matrix)


def int8_activations(group: int, outliers: int = 0) -> Callable[[Floats], Floats]:
    """Activations rounded to int8 with one f32 scale for each `group` of a row; group 0 leaves them as they are.

    The first channel of each of `outliers` equal parts of the row is 300 times larger while it is rounded, as if the
    matrix before had been scaled up and the one after scaled down: rounding causes all of the added distance.
    """

    def apply(x: Floats) -> Floats:
        if not group:
            return x
        gain = np.ones(x.shape[-1], np.float32)
        gain[[x.shape[-1] * part // outliers for part in range(outliers)]] = 300
        groups = (x * gain).reshape(-1, min(group, x.shape[-1]))
        scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
        return (np.rint(_divide(groups, scale)) * scale).reshape(x.shape) / gain

    return apply
