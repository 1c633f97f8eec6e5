"""MiniMax: how config.json is read, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule.archs.spec import Attention, LightningAttention, ModelSpec, Part, RmsNorm, Tensor

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("minimax", {"layer_types": ["conv"] * 3}, "layer_types must be a list of 3 items"),
    ("minimax", {"mlp_beta_factor": "1"}, "mlp_beta_factor must be a finite number"),
    ("minimax", {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def lightning(spec: ModelSpec, layer: int) -> LightningAttention:
    (mixer,) = spec.layers[layer].mixers(LightningAttention)
    return mixer


def test_kinds_of_layers() -> None:
    spec = spec_of("minimax")
    assert [len(layer.mixers(Attention)) for layer in spec.layers] == [0, 1, 0]
    default = spec_of("minimax", layer_types=LEFT_OUT, sliding_window=16)
    assert [[found.window for found in layer.mixers(Attention)] for layer in default.layers] == [[16], [], [16]]
    assert [rope.theta for rope in spec_of("minimax", rope_parameters=LEFT_OUT).ropes] == [1e6]


def test_heads_decay_by_head_and_layer() -> None:
    spec = spec_of("minimax")
    for layer, share in ((0, 1 + 1e-5), (2, 1 - 2 / (2 + 1e-5) + 1e-5)):
        slopes = [-math.log(decay) for decay in lightning(spec, layer).decays]
        assert slopes == pytest.approx([share * 2.0**-power for power in (2, 4, 6, 8)])
    assert (lightning(spec, 0).head_dim, lightning(spec, 0).norm) == (16, RmsNorm(1e-6))


def test_factors_of_stream_and_output() -> None:
    factors = [
        [(block.stream_scale, block.residual_scale) for block in layer.blocks] for layer in spec_of("minimax").layers
    ]
    assert factors == [[(1.3, 0.8), (1.1, 1.2)], [(1.2, 0.9), (1.1, 1.2)], [(1.3, 0.8), (1.1, 1.2)]]
    plain = spec_of("minimax", mlp_alpha_factor=LEFT_OUT, mlp_beta_factor=LEFT_OUT)
    assert (plain.layers[0].blocks[1].stream_scale, plain.layers[0].blocks[1].residual_scale) == (1, 1)
    assert all(block.residual_after_norm for layer in plain.layers for block in layer.blocks)


def test_projections_are_interleaved_by_head() -> None:
    tensors = spec_of("minimax").tensors
    at = "model.layers.2.self_attn"
    assert tensors["layers.2.lightning_attention.k.weight"] == Tensor((f"{at}.qkv_proj.weight",), part=Part(16, 16, 48))
    assert tensors["layers.2.lightning_attention.gate.weight"] == Tensor((f"{at}.output_gate.weight",))
    assert tensors["layers.2.lightning_attention.norm.weight"] == Tensor((f"{at}.norm.weight",))
