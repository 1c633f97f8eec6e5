"""Llama 4, and Llamas with other networks: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, last_experts, projections, rotated, sparse, spec_of, width
from ferrule.archs.spec import Dense, HeadNorm, ModelSpec, Part, QueryGrowth, RmsNorm, Stack, Xielu

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 4 items, each 0 or 1"),
    ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types must be a list of 4 items, each one of full_"),
    ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size must be an integer from 1"),
    ("llama4", {"attn_temperature_tuning": -1}, "attn_temperature_tuning must be an integer from 0"),
    ("llama4", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning must be true or false"),
    ("llama4", {"floor_scale": 0.5}, "floor_scale must be an integer from 1"),
    ("apertus", {"hidden_act": "silu"}, "hidden_act must be \"xielu\", got 'silu'"),
    ("bitnet", {"quantization_config": {"quant_method": "bitnet"}}, "quantization_config must be missing"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def chunks(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.chunk for layer in spec.layers]


def growths(spec: ModelSpec) -> list[QueryGrowth | None]:
    return [layer.attention.query_growth for layer in spec.layers]


def test_llama_4_layers_are_rotated_and_chunked_or_see_everything() -> None:
    spec = spec_of("llama4")
    assert rotated(spec) == [True, True, True, False]
    assert chunks(spec) == [64, 64, 64, None]
    assert growths(spec) == [None, None, None, QueryGrowth(0.3, length=16, offset=1)]
    norm = HeadNorm(RmsNorm(1e-5, weight=False), after_rope=True)
    assert [projections(layer).qk_norm for layer in spec.layers] == [norm, norm, norm, None]
    by_rule = spec_of("llama4", no_rope_layers=LEFT_OUT, layer_types=LEFT_OUT, no_rope_layer_interval=2)
    assert (rotated(by_rule), chunks(by_rule)) == ([True, False, True, False], [64, None, 64, None])
    plain = spec_of("llama4", attn_temperature_tuning=False, use_qk_norm=False, attention_chunk_size=None)
    assert (growths(plain), chunks(plain)) == ([None] * 4, [None] * 4)
    assert projections(plain.layers[0]).qk_norm is None


def test_llama_4_may_have_an_integer_for_temperature_tuning() -> None:
    """The first published files have 4 there, which counts as true."""
    grown = growths(spec_of("llama4"))
    for tuning, expected in ((4, grown), (LEFT_OUT, grown), (None, grown), (0, [None] * 4)):
        assert growths(spec_of("llama4", attn_temperature_tuning=tuning)) == expected


def test_llama_4_experts() -> None:
    spec = spec_of("llama4")
    router = last_experts(spec).router
    assert (router.scoring, router.weigh_input, last_experts(spec).shared) == ("sigmoid", True, Dense(24))
    up = spec.tensors["layers.1.ffn.experts.2.up.weight"]
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    assert (up.names, up.transposed, up.part, up.stack) == ((name,), True, Part(24, 24, 48), Stack(2, 4))
    assert sparse(spec_of("llama4", moe_layers=[3])) == [False, False, False, True]
    every_other = spec_of("llama4", moe_layers=LEFT_OUT, interleave_moe_layer_step=2)
    assert (sparse(every_other), width(every_other)) == ([False, True, False, True], 80)


def test_apertus_network() -> None:
    spec = spec_of("apertus")
    assert spec.layers[0].block("ffn").mixer == Dense(48, gated=False, xielu=Xielu(beta=0.5, eps=-1e-6))
    assert spec.tensors["layers.1.ffn.xielu.alpha_n"].names == ("model.layers.1.mlp.act_fn.alpha_n",)


def test_bitnet_has_norms_before_the_projections_back() -> None:
    layer = spec_of("bitnet").layers[0]
    assert layer.attention.output_norm == RmsNorm(1e-5)
    assert layer.block("ffn").mixer == Dense(48, "relu2", inner_norm=RmsNorm(1e-5))
