"""Phi and Phi-3: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, heads, last_experts, spec_of, windows
from ferrule.archs.spec import LmHead, LongRopeScaling, Part, Tensor

LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok must be 2, got 3"),
    ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise must be a finite number from 0, got -0.1"),
    (
        "phimoe",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters.rope_type must be default or longrope, got 'linear'",
    ),
    (
        "phimoe",
        {"rope_parameters": {**LONGROPE, "short_mscale": 1.2}},
        "rope_parameters.long_mscale must be a finite number above 0, but it is missing",
    ),
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


def test_phimoe_longrope_has_a_factor_for_short_and_one_for_long_sequences() -> None:
    """As in transformers, whose short divisors apply to all lengths."""
    given = {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": 64}
    scaling = spec_of("phimoe", rope_parameters=given).ropes[0].scaling
    assert scaling == LongRopeScaling((1.0,) * 8, (1.0,) * 8, 64, 1.2, long_attention_factor=1.4)
    given = {**LONGROPE, "attention_factor": 1.1, "original_max_position_embeddings": 64}
    scaling = spec_of("phimoe", rope_parameters=given).ropes[0].scaling
    assert scaling == LongRopeScaling((1.0,) * 8, (2.0,) * 8, 64, 1.1)


def test_phi3_fused_projections() -> None:
    spec = spec_of("phi3", partial_rotary_factor=0.75, rope_parameters=LEFT_OUT, sliding_window=8)
    parts = [spec.tensors[f"layers.2.attention.{role}.weight"].part for role in ("q", "k", "v")]
    assert parts == [Part(0, 64, 128), Part(64, 32, 128), Part(96, 32, 128)]
    name = "model.layers.2.mlp.gate_up_proj.weight"
    assert spec.tensors["layers.2.ffn.up.weight"] == Tensor((name,), part=Part(160, 160, 320))
    assert (spec.ropes[0].rotary_dim, windows(spec)) == (12, [8, 8, 8])


def test_phimoe_router_and_biases() -> None:
    spec = spec_of("phimoe")
    router = last_experts(spec).router
    assert (router.scoring, router.jitter, router.normalize) == ("sparse_mixer", 0.01, False)
    assert (heads(spec).bias, spec.layers[0].attention.output_bias) == (True, True)
    assert spec.lm_head == LmHead(tied=False, bias=True)
    bare = spec_of("phimoe", attention_bias=LEFT_OUT, lm_head_bias=LEFT_OUT, router_jitter_noise=0.2)
    assert (heads(bare).bias, bare.lm_head) == (False, LmHead(tied=False))
    assert last_experts(bare).router.jitter == 0.2
