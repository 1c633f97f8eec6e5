"""Delta nets: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule._cli.layers import mixer_words
from ferrule.archs.spec import Attention, DeltaNet, Dense, Experts, ModelSpec, Part, RmsNorm, Stack, Tensor

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next_dense", {"layer_types": ["conv"] * 3}, "layer_types must be a list of"),
    ("qwen3_next_dense", {"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of"),
    ("olmo_hybrid", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be an integer from 1"),
    ("olmo_hybrid", {"layer_types": ["linear_attention"] * 4}, "layer_types must be a list with at least one full_"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def attending(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if layer.mixers(Attention)]


def test_layers_with_attention() -> None:
    spec = spec_of("qwen3_next_dense", layer_types=LEFT_OUT, full_attention_interval=2)
    assert attending(spec) == list(range(1, len(spec.layers), 2))
    assert attending(spec_of("qwen3_next_dense", layer_types=LEFT_OUT, num_hidden_layers=8)) == [3, 7]
    (attention,) = spec.layers[1].mixers(Attention)
    assert attention.output_gate == "elements"
    (delta_net,) = spec.layers[0].mixers(DeltaNet)
    assert (delta_net.norm, spec.final_norm) == (RmsNorm(1e-6), RmsNorm(1e-6, weight_offset=1.0))


def test_biases_of_gated_attention() -> None:
    spec = spec_of("qwen3_next_dense", attention_bias=True)
    attention = spec.layers[2].attention
    assert (attention.projections.bias, attention.gate_bias, attention.output_bias) == (True, True, True)
    name = "model.layers.2.self_attn.q_proj.bias"
    assert spec.tensors["layers.2.attention.gate.bias"] == Tensor((name,), part=Part(16, 16, 32))
    _, words = mixer_words(attention, spec.ropes)
    assert "gated output (per element, with biases)" in words
    attention = spec_of("olmo_hybrid", attention_bias=True).layers[3].attention
    assert (attention.projections.bias, attention.gate_bias, attention.output_bias) == (True, False, True)


def test_activation_after_the_convolution() -> None:
    for case in ("qwen3_next_dense", "qwen3_5_text", "olmo_hybrid"):
        (delta_net,) = spec_of(case, hidden_act="gelu").layers[0].mixers(DeltaNet)
        assert (delta_net.activation, delta_net.gate) == ("gelu", "silu")


def test_projections_are_interleaved_by_key_head_or_flat() -> None:
    at = "model.layers.0.linear_attn"
    interleaved = spec_of("qwen3_next_dense")
    (delta_net,) = interleaved.layers[0].mixers(DeltaNet)
    values = delta_net.value_heads // delta_net.key_heads * delta_net.value_dim
    part = Part(2 * delta_net.key_dim, values, 2 * delta_net.key_dim + 2 * values)
    assert interleaved.tensors["layers.0.delta_net.v.weight"] == Tensor((f"{at}.in_proj_qkvz.weight",), part=part)
    flat = spec_of("qwen3_5_text")
    (delta_net,) = flat.layers[0].mixers(DeltaNet)
    keys, values = delta_net.key_heads * delta_net.key_dim, delta_net.value_heads * delta_net.value_dim
    part = Part(2 * keys, values, 2 * keys + values)
    assert flat.tensors["layers.0.delta_net.v.weight"] == Tensor((f"{at}.in_proj_qkv.weight",), part=part)
    assert flat.tensors["layers.0.delta_net.gate.weight"] == Tensor((f"{at}.in_proj_z.weight",))


def test_experts_are_stored_apart_or_stacked() -> None:
    spec = spec_of("qwen3_5_moe")
    (experts,) = spec.layers[0].mixers(Experts)
    width = experts.expert.intermediate_size
    at = "model.layers.0.mlp.experts"
    assert spec.tensors["layers.0.ffn.experts.3.up.weight"] == Tensor(
        (f"{at}.3.up_proj.weight",),
        alternative=Tensor(
            (f"{at}.gate_up_proj",), part=Part(width, width, 2 * width), stack=Stack(3, experts.experts)
        ),
    )


def test_dense_layers_among_experts() -> None:
    more = {"num_experts": 4, "mlp_only_layers": [0], "moe_intermediate_size": 8, "norm_topk_prob": False}
    spec = spec_of("qwen3_next_dense", **more)
    assert isinstance(spec.layers[0].block("ffn").mixer, Dense)
    (experts,) = spec.layers[1].mixers(Experts)
    assert (experts.router.normalize, experts.shared_gate) == (False, True)


def test_olmo_hybrid_has_norms_before_delta_nets_and_after_attention() -> None:
    spec = spec_of("olmo_hybrid")
    norms = [[(block.norm is None, block.post_norm is None) for block in layer.blocks] for layer in spec.layers]
    assert norms == [[(False, True)] * 2] * 3 + [[(True, False)] * 2]
    (delta_net,) = spec.layers[0].mixers(DeltaNet)
    assert (delta_net.update_scale, delta_net.norm) == (2.0, RmsNorm(1e-5))
    names = ("q_conv1d", "k_conv1d", "v_conv1d")
    kernel = spec.tensors["layers.0.delta_net.kernel.weight"]
    assert kernel.names == tuple(f"model.layers.0.linear_attn.{name}.weight" for name in names)
    assert spec.layers[3].attention.rope == 0
    unrotated = spec_of("olmo_hybrid", rope_parameters={"rope_theta": None, "rope_type": "default"})
    assert unrotated.layers[3].attention.rope is None
    assert attending(spec_of("olmo_hybrid", layer_types=LEFT_OUT, num_hidden_layers=3)) == [2]
