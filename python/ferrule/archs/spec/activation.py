"""Activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "tanh", "sigmoid"]


@dataclass(frozen=True)
class Clamp:
    """Clamped gate: (u + offset) * g * sigmoid(alpha * g), g = min(gate, gate_limit), u = clamp(up, -limit, limit)."""

    alpha: float
    limit: float
    offset: float = 1.0
    """Number added to up: 1 in gpt-oss, 0 in DeepSeek-V4."""
    gate_limit: float | None = None
    """Largest gate; None for `limit`."""


@dataclass(frozen=True)
class Xielu:
    """xIELU: alpha_p * x^2 + beta * x above 0, else alpha_n * (e^min(x, eps) - 1 - x) + beta * x (Huang 2024).

    alpha_p and alpha_n are learned: the softplus of a weight, to which alpha_n adds beta.
    """

    beta: float = 0.5
    eps: float = -1e-6
    alphas: tuple[float, float] | None = None
    """The weights of alpha_p and alpha_n, in files that do not store them as tensors."""
