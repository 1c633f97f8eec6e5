"""Mamba, Mamba 2 and their hybrids: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule._cli.layers import frame_words, mixer_words
from ferrule.archs.spec import (
    Attention,
    Dense,
    Experts,
    Latent,
    LmHead,
    Mamba,
    Mamba2,
    ModelSpec,
    Part,
    Stack,
    Tensor,
)

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {"num_heads": 3}, "num_heads must be such that num_heads * head_dim is expand * hidden_size (128)"),
    ("mamba2", {"n_groups": 3}, "n_groups must be a divisor of the number of heads (8)"),
    ("mamba2", {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be a list of two numbers"),
    ("bamba", {"mamba_n_heads": 5}, "mamba_n_heads must be such that mamba_n_heads * mamba_d_head is 128"),
    (
        "granitemoehybrid",
        {"layer_types": ["conv"] * 3},
        "layer_types must be a list of 3 items, each one of linear_attention, full_attention, mamba, attention, got",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern must be a string of M, *, E, -"),
    ("nemotron_h", {"layers_block_type": []}, "layers_block_type must be a list of mamba"),
    ("nemotron_h", {"mamba_n_groups": 0}, "mamba_n_groups must be an integer from 1"),
    ("nemotron_h", {"layers_block_type": None, "layer_types": ["conv"]}, "layer_types must be a list of mamba"),
    ("falcon_h1_norm", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be a list of 5 numbers"),
    ("falcon_h1_norm", {"mlp_multipliers": [0.0, 2.0]}, "mlp_multipliers must be a list of finite numbers above 0"),
    ("jamba", {"attn_layer_offset": 4}, "attn_layer_offset must be below attn_layer_period (4), got 4"),
    ("jamba", {"sliding_window": 8}, "sliding_window must be null"),
    ("mamba", {"time_step_rank": 0}, "time_step_rank must be an integer from 1"),
    ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size must be an integer from 1"),
    ("nemotron_h", {"mamba_hidden_act": "mish"}, "mamba_hidden_act must be one of silu, swish"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def mixer(spec: ModelSpec) -> Mamba2:
    return spec.layers[0].mixers(Mamba2)[0]


def test_step_limits() -> None:
    assert (mixer(spec_of("mamba2")).min_step, mixer(spec_of("mamba2")).max_step) == (0.0, None)
    limited = mixer(spec_of("mamba2", time_step_limit=[0.001, 0.1]))
    assert (limited.min_step, limited.max_step) == (0.001, 0.1)
    assert mixer(spec_of("mamba2", time_step_limit=[0.0, float("inf")])).max_step is None


def test_tensors_of_a_mixer() -> None:
    tensors = spec_of("mamba2").tensors
    at = "backbone.layers.1.mixer"
    assert tensors["layers.1.mamba2.step.weight"] == Tensor((f"{at}.in_proj.weight",), part=Part(320, 8, 328))
    assert tensors["layers.1.mamba2.decay_log.weight"] == Tensor((f"{at}.A_log",))
    assert tensors["layers.1.mamba2.kernel.bias"] == Tensor((f"{at}.conv1d.bias",))


def test_layers_of_nemotron_have_one_mixer_each() -> None:
    spec = spec_of("nemotron_h")
    kinds = [type(block.mixer) for layer in spec.layers for block in layer.blocks]
    assert kinds == [Mamba2, Experts, Attention, Dense, Mamba2, Experts, Attention, Dense]
    assert spec.layers[2].attention.rope is None
    names = [["mamba", "moe", "attention", "mlp"], ["linear_attention", "moe", "full_attention", "mlp"]]
    for field in ("layers_block_type", "layer_types"):
        # The list takes precedence over the pattern.
        for found in (spec_of("nemotron_h", **{field: types}) for types in names):
            assert [type(layer.blocks[0].mixer) for layer in found.layers] == kinds[:4]


def test_latent_and_biases_of_nemotron() -> None:
    spec = spec_of("nemotron_h", mlp_bias=True, moe_latent_size=8, use_bias=True, mamba_proj_bias=False)
    (experts,) = spec.layers[1].mixers(Experts)
    assert experts.shared is not None
    assert (experts.latent, experts.expert.bias, experts.shared.bias) == (Latent(8, bias=True), False, True)
    at = "backbone.layers.1.mixer"
    assert spec.tensors["layers.1.ffn.latent_in.bias"] == Tensor((f"{at}.fc1_latent_proj.bias",))
    assert "layers.1.ffn.experts.0.up.bias" not in spec.tensors
    assert spec.tensors["layers.1.ffn.experts.2.up.weight"] == Tensor(
        (f"{at}.experts.2.up_proj.weight",), alternative=Tensor((f"{at}.experts.up_proj",), stack=Stack(2, 6))
    )
    assert (mixer(spec).bias, mixer(spec).output_bias) == (True, True)
    assert not mixer(spec_of("nemotron_h", mamba_proj_bias=True)).bias
    _, words = mixer_words(experts, [])
    assert "experts on a latent of 8, with biases" in words


def test_other_names_of_nemotrons_fields_take_precedence() -> None:
    named = {"mamba_n_groups": 3, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_dt_limit": [0.001, 0.1]}
    found = mixer(spec_of("nemotron_h", **named, mamba_hidden_act="gelu_pytorch_tanh"))
    assert (found.groups, found.norm_groups, found.taps, found.kernel_bias) == (3, 3, 3, False)
    assert (found.min_step, found.max_step, found.activation) == (0.001, 0.1, "gelu_tanh")
    _, words = mixer_words(found, [])
    assert "convolution over 3 tokens, gelu_tanh" in words


def test_granite_is_hybrid_dense_or_without_mamba() -> None:
    hybrid = spec_of("granitemoehybrid")
    assert [bool(layer.mixers(Attention)) for layer in hybrid.layers] == [False, True, False]
    assert (hybrid.layers[1].attention.rope, hybrid.layers[0].mixers(Experts)[0].shared) == (None, Dense(32))
    assert spec_of("granitemoehybrid_dense").layers[0].mixers(Experts) == []
    assert spec_of("granitemoehybrid_rope").layers[0].attention.rope == 0


def test_falcon_h1_runs_both_mixers_on_one_input() -> None:
    first = spec_of("falcon_h1_norm", ssm_out_multiplier=0.25, mlp_multipliers=[2.0, 0.5]).layers[0]
    assert [(type(block.mixer), block.parallel, block.norm is None) for block in first.blocks] == [
        (Mamba2, False, False),
        (Attention, True, True),
        (Dense, False, False),
    ]
    assert [block.residual_scale for block in first.blocks] == [0.25, 1.0, 0.5]
    assert first.mixers(Dense)[0].gate_scale == 2.0
    assert (first.mixers(Mamba2)[0].scales, first.mixers(Mamba2)[0].norm_groups) == (None, 2)
    assert frame_words(first).startswith("rms norm before all blocks; parallel blocks")


def test_biases_of_falcon_h1_and_factors_on_inputs() -> None:
    changes = {"mamba_proj_bias": True, "attention_bias": True, "ssm_in_multiplier": 2.0, "key_multiplier": 0.5}
    first = spec_of("falcon_h1_norm", **changes, attention_in_multiplier=0.25).layers[0]
    assert [block.input_scale for block in first.blocks] == [2.0, 0.25, 1.0]
    (found,) = first.mixers(Mamba2)
    assert (found.bias, found.output_bias, found.scales) == (True, False, None)
    assert first.attention.scale == spec_of("falcon_h1_norm").layers[0].attention.scale / 2
    assert "input scale 2; input scale 0.25" in frame_words(first)
    _, words = mixer_words(found, [])
    assert words.endswith("biases on inputs and convolution")
    _, words = mixer_words(mixer(spec_of("falcon_h1_norm", projectors_bias=True, mamba_conv_bias=False)), [])
    assert words.endswith("biases on outputs")


def test_width_of_falcon_h1_is_a_default_or_expanded() -> None:
    wide = mixer(spec_of("falcon_h1_norm", mamba_d_ssm=None, mamba_d_head="auto", mamba_n_heads=8))
    assert (wide.heads, wide.head_dim) == (8, 16)
    absent = mixer(spec_of("falcon_h1_norm", mamba_d_ssm=LEFT_OUT, mamba_d_head="auto", mamba_n_heads=8))
    assert (absent.heads, absent.head_dim) == (8, 128)


def test_activation_of_mamba2_is_that_of_the_networks() -> None:
    assert mixer(spec_of("bamba", hidden_act="gelu")).activation == "gelu"
    assert mixer(spec_of("falcon_h1_norm")).activation == "silu"


def test_norm_of_falcon_h1_is_optional_and_may_precede_the_gate() -> None:
    assert not mixer(spec_of("falcon_h1_norm")).norm_before_gate
    assert mixer(spec_of("falcon_h1_norm", mamba_norm_before_gate=LEFT_OUT)).norm_before_gate
    assert mixer(spec_of("falcon_h1_norm", mamba_rms_norm=False)).norm is None


def test_sizes_of_mamba_have_defaults() -> None:
    [found] = spec_of("mamba").layers[0].mixers(Mamba)
    assert (found.channels, found.state_size, found.step_rank, found.norm) == (128, 16, 4, None)
    gone = {"time_step_rank": "auto", "intermediate_size": LEFT_OUT, "expand": 3, "hidden_size": 72}
    [found] = spec_of("mamba", **gone).layers[0].mixers(Mamba)
    assert (found.channels, found.step_rank) == (216, 5)
    assert [spec_of("mamba", tie_word_embeddings=LEFT_OUT).lm_head, spec_of("falcon_mamba").lm_head] == [
        LmHead(tied=True),
        LmHead(tied=False),
    ]


def test_tensors_of_mamba() -> None:
    tensors = spec_of("falcon_mamba").tensors
    at = "backbone.layers.1.mixer"
    assert tensors["layers.1.mamba.gate.weight"] == Tensor((f"{at}.in_proj.weight",), part=Part(128, 128, 256))
    assert tensors["layers.1.mamba.c.weight"] == Tensor((f"{at}.x_proj.weight",), part=Part(20, 16, 36))
    assert tensors["layers.1.mamba.step_bias.weight"] == Tensor((f"{at}.dt_proj.bias",))
    assert "layers.1.mamba.b_norm.weight" not in tensors


def test_periods_and_offsets_give_the_layers_of_jamba() -> None:
    spec = spec_of("jamba", num_hidden_layers=8)
    assert [index for index, layer in enumerate(spec.layers) if layer.mixers(Attention)] == [2, 6]
    assert [index for index, layer in enumerate(spec.layers) if layer.mixers(Experts)] == [1, 3, 5, 7]
    assert spec.layers[2].attention.rope is None
    assert spec.tensors["layers.1.mamba.b_norm.weight"] == Tensor(("model.layers.1.mamba.b_layernorm.weight",))
    assert not any(layer.mixers(Experts) for layer in spec_of("jamba", num_experts=1).layers)


def test_mixers_in_words() -> None:
    words = "128 channels with a state of 16; steps of rank 4; convolution over 4 tokens; "
    assert mixer_words(spec_of("mamba").layers[0].blocks[0].mixer, []) == ("Mamba", f"{words}biases on convolution")
    _, of_jamba = mixer_words(spec_of("jamba").layers[0].blocks[0].mixer, [])
    assert of_jamba == f"{words}rms norm of steps, keys and queries; biases on convolution"


def test_nemotron_stores_its_lm_head() -> None:
    assert spec_of("nemotron_h", tie_word_embeddings=True).lm_head == LmHead(tied=False)
