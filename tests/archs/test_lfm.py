"""LFM2 and LFM3: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule.archs.spec import (
    Attention,
    Dense,
    Experts,
    LmHead,
    ModelSpec,
    Part,
    ProportionalScaling,
    RmsNorm,
    Rope,
    ShortConvolution,
    Tensor,
)

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "lfm2_moe",
        {"layer_types": ["conv"] * 3},
        "layer_types must be a list of 4 items, each one of conv, full_attention",
    ),
    (
        "lfm2_moe",
        {"layer_types": ["mamba"] * 4},
        "layer_types must be a list of 4 items, each one of conv, full_attention",
    ),
    ("lfm2", {"full_attn_idxs": [-1]}, "full_attn_idxs must be a list of integers from 0"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache must be an integer from 1"),
    ("lfm3", {"layer_types": ["mamba"] * 6}, "layer_types must be a list of 6 items, each one of conv, full_attention"),
    ("lfm3", {"sliding_window": None}, "sliding_window must be an integer, because the model has sliding layers"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def kinds(spec: ModelSpec) -> list[str]:
    return [layer.blocks[0].name for layer in spec.layers]


def test_layers_with_convolutions() -> None:
    old = spec_of("lfm2")
    short = "short_convolution"
    assert kinds(old) == [short, short, "attention", short, "attention", short]
    assert old.layers[0].mixers(ShortConvolution) == [ShortConvolution(64, taps=3)]
    assert (old.layers[0].mixers(Attention), old.layers[2].mixers(ShortConvolution)) == ([], [])
    with pytest.raises(LookupError, match="one attention was expected, this one has 0"):
        _ = old.layers[0].attention
    with pytest.raises(LookupError, match="no block 'attention'; the layer has short_convolution, ffn"):
        old.layers[0].block("attention")
    assert kinds(spec_of("lfm2", full_attn_idxs=LEFT_OUT)) == ["attention"] * 6
    assert kinds(spec_of("lfm2_vl")) == ["short_convolution", "attention"] * 2


def test_tensors_of_a_convolution() -> None:
    tensors = spec_of("lfm2").tensors
    at = "model.layers.1.conv"
    assert tensors["layers.1.short_convolution.c.weight"] == Tensor((f"{at}.in_proj.weight",), part=Part(64, 64, 192))
    assert tensors["layers.1.short_convolution.kernel.weight"] == Tensor((f"{at}.conv.weight",))
    assert tensors["layers.1.short_convolution_norm.weight"].names == ("model.layers.1.operator_norm.weight",)
    biased = spec_of("lfm2", conv_bias=True).tensors
    assert biased["layers.1.short_convolution.kernel.bias"] == Tensor((f"{at}.conv.bias",))


def test_width_of_the_network() -> None:
    def width(**changes: Any) -> object:
        return spec_of("lfm2", **changes).layers[0].block("ffn").mixer

    assert width() == Dense(48)
    assert width(block_ff_dim=LEFT_OUT, intermediate_size=96) == Dense(64)
    assert width(block_ffn_dim_multiplier=1.5) == Dense(80)
    assert width(block_auto_adjust_ff_dim=False) == Dense(70)


def test_experts_follow_dense_layers() -> None:
    spec = spec_of("lfm2_moe")
    assert [len(layer.mixers(Experts)) for layer in spec.layers] == [0, 1, 1, 1]
    (experts,) = spec.layers[1].mixers(Experts)
    assert (experts.router.scoring, experts.router.correction_bias, experts.router.normalize) == ("sigmoid", True, True)


def test_lfm3_has_windows_and_ropes_by_type_of_layer() -> None:
    spec = spec_of("lfm3")
    short = "short_convolution"
    assert kinds(spec) == [short, short, "attention", short, "attention", short]
    assert spec.layers[0].mixers(ShortConvolution) == [ShortConvolution(64, taps=7)]
    full, sliding = spec.layers[2].attention, spec.layers[4].attention
    assert (full.window, sliding.window) == (None, 32)
    assert (full.rope, sliding.rope) == (0, 1)
    assert spec.ropes == [Rope(1e6, 16, scaling=ProportionalScaling(rotated_pairs=4)), Rope(1e4, 16)]
    assert spec_of("lfm3", rope_parameters=LEFT_OUT).ropes == spec.ropes
    only_sliding = {
        "layer_types": ["conv", "sliding_attention"] * 3,
        "rope_parameters": {"sliding_attention": {"rope_theta": 10_000.0}},
    }
    assert spec_of("lfm3", **only_sliding).ropes == [Rope(1e4, 16)]
    assert kinds(spec_of("lfm3", layer_types=LEFT_OUT)) == [short, short, "attention", short, "attention", short]


def test_switches_of_lfm3() -> None:
    spec = spec_of("lfm3")
    norm = RmsNorm(1e-5)
    assert [(block.norm, block.post_norm) for block in spec.layers[0].blocks] == [(norm, norm)] * 2
    assert spec.tensors["layers.2.attention.gate.weight"] == Tensor(
        ("model.layers.2.self_attn.gate_proj.weight",), alternative=Tensor(("model.layers.2.self_attn.g_proj.weight",))
    )
    assert (spec.layers[2].attention.output_gate, spec.lm_head) == ("heads", LmHead(tied=True))
    plain = spec_of(
        "lfm3", use_sandwich_norm=False, use_attention_gate=False, attention_bias=True, tie_word_embeddings=False
    )
    assert [block.post_norm for block in plain.layers[0].blocks] == [None] * 2
    assert (plain.layers[2].attention.output_gate, plain.lm_head) == (None, LmHead(tied=False))
    assert {"layers.2.attention.v.bias", "layers.2.attention.output.bias"} <= plain.tensors.keys()
