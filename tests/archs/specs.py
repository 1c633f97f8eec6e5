"""Model specs of the golden checkpoints with changed configurations, and the parts of a spec that the tests compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ferrule import ConfigError
from ferrule.archs import model_spec
from ferrule.archs.config import Config
from ferrule.archs.spec import Dense, Experts, HeadProjections, LatentProjections, Layer, ModelSpec, Part, Rope

GOLDEN = Path(__file__).parents[1] / "golden"
LEFT_OUT = object()
"""Value of a field that is left out of the configuration; None writes null."""


def folder_of(case: str) -> Path:
    """Directory of a golden case."""
    return next(path for kind in ("logits", "variants") if (path := GOLDEN / kind / case).is_dir())


def spec_of(case: str, **changes: Any) -> ModelSpec:
    """Spec of a golden case with other values in its config.json."""
    values = {**json.loads((folder_of(case) / "config.json").read_text()), **changes}
    kept = {key: value for key, value in values.items() if value is not LEFT_OUT}
    return model_spec(Config(kept, Path("config.json")))


def renamed(case: str, name: str, model_type: str, **changes: Any) -> ModelSpec:
    """Spec of a family whose files look like those of a golden case of another family."""
    return spec_of(case, architectures=[name], model_type=model_type, **changes)


def assert_refused(case: str, changes: dict[str, Any], message: str) -> None:
    """Checks that a configuration is refused with an error that names the field, the value and the limit."""
    with pytest.raises(ConfigError) as caught:
        spec_of(case, **changes)
    assert f"config.json: {message}" in str(caught.value)


def windows(spec: ModelSpec) -> list[int | None]:
    """Attention window of each layer."""
    return [layer.attention.window for layer in spec.layers]


def ropes(spec: ModelSpec) -> list[Rope | None]:
    """Rotary embedding of each layer."""
    indices = [layer.attention.rope for layer in spec.layers]
    return [None if index is None else spec.ropes[index] for index in indices]


def rotated(spec: ModelSpec) -> list[bool]:
    """Layers with a rotary embedding."""
    return [rope is not None for rope in ropes(spec)]


def experts(spec: ModelSpec) -> list[Experts | None]:
    """Mixture of experts of each layer; None for dense layers."""
    return [next(iter(layer.mixers(Experts)), None) for layer in spec.layers]


def sparse(spec: ModelSpec) -> list[bool]:
    """Layers with a mixture of experts."""
    return [found is not None for found in experts(spec)]


def last_experts(spec: ModelSpec) -> Experts:
    """Mixture of experts of the last layer."""
    found = experts(spec)[-1]
    assert found is not None
    return found


def projections(layer: Layer) -> HeadProjections:
    """Query, key and value projections of a layer."""
    assert isinstance(layer.attention.projections, HeadProjections)
    return layer.attention.projections


def heads(spec: ModelSpec) -> HeadProjections:
    """Query, key and value projections of the first layer."""
    return projections(spec.layers[0])


def latents(spec: ModelSpec) -> LatentProjections:
    """Latent projections of the first layer."""
    found = spec.layers[0].attention.projections
    assert isinstance(found, LatentProjections)
    return found


def width(spec: ModelSpec) -> int:
    """Intermediate size of the first feed-forward network."""
    ffn = spec.layers[0].block("ffn").mixer
    assert isinstance(ffn, Dense)
    return ffn.intermediate_size


def qkv_parts(spec: ModelSpec) -> list[Part | None]:
    """Slices of the fused tensor that hold the first layer's queries, keys and values."""
    return [spec.tensors[f"layers.0.attention.{role}.weight"].part for role in ("q", "k", "v")]
