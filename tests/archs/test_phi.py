"""Phi and Phi-3: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of, windows
from ferrule.archs.spec import LongRopeScaling, Part, Tensor

LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("phi", {"qk_layernorm": "yes"}, "qk_layernorm must be true or false"),
    ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type must be default or"),
    (
        "phi3",
        {"rope_parameters": {**LONGROPE, "short_factor": [1.0] * 7}},
        "rope_parameters.short_factor must be a list of 8 numbers",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_phi3_longrope_original_length() -> None:
    """The top-level original length is used; without it and without a factor, the first models' length is."""
    scaled = {"rope_parameters": LONGROPE, "max_position_embeddings": 8192}
    by_default = spec_of("phi3", original_max_position_embeddings=LEFT_OUT, **scaled).ropes[0].scaling
    assert isinstance(by_default, LongRopeScaling)
    assert by_default.original_max_position_embeddings == 4096
    given = spec_of("phi3", **{**scaled, "rope_parameters": {**LONGROPE, "factor": 4096.0}}).ropes[0].scaling
    assert isinstance(given, LongRopeScaling)
    assert given.original_max_position_embeddings == 256
    assert given.attention_factor == pytest.approx((1 + 12 / 8) ** 0.5)
    assert spec_of("phi3", **scaled).max_position_embeddings == 8192


def test_phi3_fused_projections() -> None:
    spec = spec_of("phi3", partial_rotary_factor=0.75, rope_parameters=LEFT_OUT, sliding_window=8)
    parts = [spec.tensors[f"layers.2.attention.{role}.weight"].part for role in ("q", "k", "v")]
    assert parts == [Part(0, 64, 128), Part(64, 32, 128), Part(96, 32, 128)]
    name = "model.layers.2.mlp.gate_up_proj.weight"
    assert spec.tensors["layers.2.ffn.up.weight"] == Tensor((name,), part=Part(160, 160, 320))
    assert (spec.ropes[0].rotary_dim, windows(spec)) == (12, [8, 8, 8])
