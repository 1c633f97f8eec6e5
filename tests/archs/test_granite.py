"""Granite, dense and with experts: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, experts, last_experts, renamed, ropes, spec_of, windows
from ferrule import UnsupportedModelError
from ferrule.archs.spec import Dense, Experts, LmHead, Part, Router, Stack, Tensor

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("granite", {"logits_scaling": 0}, "logits_scaling must be a finite number from 1e-30"),
    ("granite_swa", {"layer_rope_theta": [0, 10.0]}, "layer_rope_theta must be a list of 5 numbers"),
    (
        "granite_swa",
        {"layer_rope_theta": [0, 0, "1", 0, 0]},
        "layer_rope_theta must be a finite number from 0, got '1'",
    ),
    ("granite_swa", {"layer_rope_theta": [0, 0, 1, 0, 0]}, "layer_rope_theta must be a list of numbers, each one 0 or"),
    ("granite_swa", {"sliding_window": None}, "sliding_window must be an integer, and enabled"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_granite_multipliers() -> None:
    fields = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
    bare = spec_of("granite", **dict.fromkeys(fields, LEFT_OUT))
    assert (bare.layers[0].attention.scale, bare.layers[0].block("ffn").residual_scale) == (1.0, 1.0)
    assert (bare.embedding.scale, bare.lm_head) == (1.0, LmHead(tied=False))
    spec = spec_of("granite")
    assert (spec.layers[0].attention.scale, spec.layers[0].block("ffn").residual_scale) == (0.2, 0.3)
    assert (spec.embedding.scale, spec.lm_head) == (6.0, LmHead(tied=False, scale=0.25))


def test_granitemoe_experts_are_stacked_in_one_tensor() -> None:
    spec = renamed("granite", "GraniteMoeForCausalLM", "granitemoe", num_local_experts=6)
    assert last_experts(spec) == Experts(6, 2, Dense(160), Router(scoring="softmax_of_chosen"))
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    up = spec.tensors["layers.1.ffn.experts.4.up.weight"]
    assert up == Tensor((name,), part=Part(160, 160, 320), stack=Stack(4, 6))
    with pytest.raises(UnsupportedModelError, match="mlp_bias must be false, got True"):
        renamed("granite", "GraniteMoeForCausalLM", "granitemoe", mlp_bias=True)


def test_granitemoeshared_without_a_shared_expert() -> None:
    (first, _) = experts(spec_of("granitemoeshared"))
    assert first is not None
    assert first.shared == Dense(64, "silu")
    (first, _) = experts(spec_of("granitemoeshared", shared_intermediate_size=0))
    assert first is not None
    assert first.shared is None


def test_granite_swa_layers_have_their_own_base_and_window() -> None:
    spec = spec_of("granite_swa")
    assert [rope and rope.theta for rope in ropes(spec)] == [None, 10_000.0, 5000.0, 10_000.0, None]
    assert windows(spec) == [None, 32, 32, 32, None]
    assert all(layer.attention.sinks for layer in spec.layers)
    plain = spec_of("granite_swa", layer_rope_theta=LEFT_OUT, rope_parameters={"rope_theta": 500.0})
    assert [rope and rope.theta for rope in ropes(plain)] == [500.0] * 5


def test_granitemoe_swa_experts_are_stacked_under_their_own_names() -> None:
    name = "model.layers.1.block_sparse_moe.experts.gate_up_proj"
    up = spec_of("granitemoe_swa").tensors["layers.1.ffn.experts.4.up.weight"]
    apart = Tensor(("model.layers.1.block_sparse_moe.experts.4.up_proj.weight",))
    assert up == Tensor((name,), part=Part(16, 16, 32), stack=Stack(4, 5), alternative=apart)
    shared = last_experts(spec_of("granitemoe_swa", shared_intermediate_size=24)).shared
    assert shared == Dense(24)
