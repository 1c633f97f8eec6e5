"""MiMo-V2-Flash: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, projections, ropes, sparse, spec_of, windows
from ferrule.archs.spec import HeadProjections, ModelSpec

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mimo_v2_flash", {"swa_head_dim": 32}, "swa_head_dim must be 24, got 32"),
    ("mimo_v2_flash", {"swa_num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads"),
    ("mimo_v2_flash", {"attention_value_scale": 0}, "attention_value_scale must be a finite number above 0"),
    ("mimo_v2_flash", {"scoring_func": "softmax"}, 'scoring_func must be "sigmoid"'),
    ("mimo_v2_flash", {"layer_types": None, "hybrid_layer_pattern": [2]}, "hybrid_layer_pattern must be a list of"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def sinks(spec: ModelSpec) -> list[bool]:
    return [layer.attention.sinks for layer in spec.layers]


def test_sliding_layers_have_sinks_and_more_key_value_heads() -> None:
    spec = spec_of("mimo_v2_flash")
    assert [projections(layer) for layer in spec.layers] == [HeadProjections(n, 24, 16) for n in (1, 2, 1)]
    assert sinks(spec) == [False, True, False]
    assert [rope and (rope.theta, rope.rotary_dim) for rope in ropes(spec)] == [(5e6, 8), (1e4, 8), (5e6, 8)]
    other = spec_of(
        "mimo_v2_flash",
        swa_num_key_value_heads=4,
        add_full_attention_sink_bias=True,
        add_swa_attention_sink_bias=False,
    )
    assert [projections(layer).kv_heads for layer in other.layers] == [1, 4, 1]
    assert sinks(other) == [True, False, True]


def test_biases_of_attention() -> None:
    first = spec_of("mimo_v2_flash", attention_bias=True).layers[0]
    assert (projections(first).bias, first.attention.output_bias) == (True, False)


def test_the_window_counts_the_present_token() -> None:
    assert windows(spec_of("mimo_v2_flash")) == [None, 32, None]
    assert windows(spec_of("mimo_v2_flash", sliding_window_size=LEFT_OUT, sliding_window=40)) == [None, 40, None]
    assert windows(spec_of("mimo_v2_flash", sliding_window=40)) == [None, 32, None], "as in transformers"


def test_values_are_scaled_by_the_residual_scale_of_attention() -> None:
    layer = spec_of("mimo_v2_flash").layers[0]
    assert (layer.block("attention").residual_scale, layer.block("ffn").residual_scale) == (0.707, 1.0)
    unscaled = spec_of("mimo_v2_flash", attention_value_scale=None).layers[0]
    assert unscaled.block("attention").residual_scale == 1.0


def test_published_files_have_numbers_for_types_of_layers() -> None:
    published = spec_of(
        "mimo_v2_flash",
        layer_types=LEFT_OUT,
        mlp_layer_types=LEFT_OUT,
        rope_parameters=LEFT_OUT,
        hybrid_layer_pattern=[0, 1, 0],
        moe_layer_freq=[0, 1, 1],
        rope_theta=5e6,
        swa_rope_theta=1e4,
        partial_rotary_factor=0.334,
    )
    spec = spec_of("mimo_v2_flash")
    assert (windows(published), ropes(published), sparse(published)) == (windows(spec), ropes(spec), sparse(spec))
