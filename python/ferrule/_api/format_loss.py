"""Measured loss of weight formats, from which commands warn before a format hurts a small model.

docs/formats.md has the commands that measure the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

HARMFUL = 0.05
"""Mean KL divergence in nats from which a format is said to hurt a model."""
SIMILAR = 2.0
"""Largest ratio of the numbers of parameters of models of similar size."""


@dataclass(frozen=True)
class MeasuredModel:
    """Loss of the formats of one model, relative to its f32 weights."""

    name: str
    parameters: int
    kld: dict[str, float]
    """Mean KL divergence per token in nats, by quantization; the largest format first."""
    same_top: dict[str, float]
    """Share of tokens with the same most likely token, by quantization."""


MEASURED = (
    MeasuredModel("the embedded model", 5_767_168, {"int8": 0.00023, "int4": 0.00514}, {"int8": 0.990, "int4": 0.952}),
    MeasuredModel("SmolLM2 135M", 134_479_872, {"int8": 0.003, "int4": 0.133}, {"int8": 0.970, "int4": 0.820}),
)
"""Measured models, in ascending order of size."""


def format_warning(parameters: int, quantization: str) -> str | None:
    """Returns a sentence if the format hurt the measured model of the most similar size, with the better format.

    It returns None for a format that was not measured, and for a size that no measured model is similar to.
    """
    nearest = min(MEASURED, key=lambda model: _ratio(model.parameters, parameters))
    loss = nearest.kld.get(quantization, 0.0)
    if loss < HARMFUL or _ratio(nearest.parameters, parameters) > SIMILAR:
        return None
    better = [f"{name} has {kld:.2g}" for name, kld in nearest.kld.items() if kld < HARMFUL][-1:]
    described = f"its KL divergence from f32 is {loss:.2g} on {nearest.name}, with the same top token in "
    return f"{quantization} hurts models of this size: {described}{nearest.same_top[quantization]:.0%}" + "".join(
        f"; {text}" for text in better
    )


def _ratio(a: int, b: int) -> float:
    return max(a, b) / max(min(a, b), 1)
