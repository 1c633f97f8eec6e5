"""Gemma 1 to 4 and VaultGemma: how config.json is read, and what is refused."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, heads, spec_of, windows
from ferrule import UnsupportedModelError
from ferrule.archs.spec import (
    Alternating,
    Dense,
    HeadProjections,
    LinearScaling,
    LmHead,
    ModelSpec,
    NoScaling,
    Part,
    PerLayerEmbedding,
    ProjectedEnds,
    ProportionalScaling,
    RmsNorm,
    Side,
    Streams,
    Table,
)

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false, got True"),
    ("gemma", {"hidden_act": "mish"}, "hidden_act must be one of silu, "),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false, got True"),
    ("gemma2", {"hidden_activation": "mish"}, "hidden_activation must be one of silu, "),
    ("gemma2", {"sliding_window": None}, "sliding_window must be an integer, and enabled"),
    ("gemma2", {"sliding_window": None, "layer_types": None}, "sliding_window must be an integer"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a finite number above 0, got 0"),
    ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be a finite number above 0, got -1"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer from 1"),
    (
        "gemma4_kv",
        {"use_bidirectional_attention": "all"},
        'use_bidirectional_attention must be "vision", false or null',
    ),
    ("gemma4_kv", {"num_global_key_value_heads": 3}, "num_global_key_value_heads must be a divisor of num_attention_"),
    ("gemma4_kv", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config must be an object with one head_dim"),
    ("gemma4_kv", {"per_layer_config": {"5": {}}}, "per_layer_config must be an object with keys from 0 to 4"),
    ("gemma4_kv", {"per_layer_config": {"-1": {}}}, "per_layer_config must be an object with keys from 0 to 4"),
    ("gemma4_kv", {"per_layer_config": {"4": []}}, "per_layer_config.4 must be an object, got []"),
    (
        "gemma4_kv",
        {"per_layer_config": {"4": {"head_dim": 0}}},
        "per_layer_config.4.head_dim must be an integer from 1",
    ),
    (
        "gemma4_kv",
        {"per_layer_config": {"4": {"num_key_value_heads": 3}}},
        "per_layer_config.4.num_key_value_heads must be a divisor of num_attention_heads (4), got 3",
    ),
    (
        "gemma4_e",
        {"per_layer_config": {"1": {"num_key_value_heads": 4}}},
        "per_layer_config must be an object with the same heads in layers that share keys and values",
    ),
    ("gemma4_kv", {"sliding_window": None, "layer_types": ["full"] * 5}, "layer_types must be a list of 5 items"),
    ("gemma4_e", {"num_kv_shared_layers": 6}, "num_kv_shared_layers must be below num_hidden_layers (6), got 6"),
    ("gemma4_e", {"num_kv_shared_layers": -1}, "num_kv_shared_layers must be an integer from 0 to"),
    (
        "gemma4_e",
        {"num_kv_shared_layers": 4},
        "num_kv_shared_layers must be such that one of the first 2 layers, which are not shared, is of the type full_",
    ),
    ("gemma4_e", {"use_double_wide_mlp": 2}, "use_double_wide_mlp must be true or false, got 2"),
    ("gemma4_e", {"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input must be an integer from 0 to"),
    ("gemma4_e", {"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input must be an integer from 1 to"),
    ("gemma4_moe", {"num_experts": None}, "num_experts must be an integer from 1 to 65536, got None"),
    ("gemma4_moe", {"top_k_experts": 0}, "top_k_experts must be an integer from 1 to"),
    ("gemma4_moe", {"moe_intermediate_size": None}, "moe_intermediate_size must be an integer from 1 to"),
    ("gemma4_moe", {"num_experts": 60_000}, "num_hidden_layers must be small enough for at most 131072 experts"),
    ("gemma3n", {"intermediate_size": [48, 48]}, "intermediate_size must be an integer, or a list of 5 integers"),
    ("gemma3n", {"intermediate_size": [48, 48, 48, 48, 0]}, "intermediate_size must be a list of integers from 1 to"),
    (
        "gemma3n",
        {"activation_sparsity_pattern": [0.5]},
        "activation_sparsity_pattern must be a number from 0 to below 1",
    ),
    ("gemma3n", {"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern must be a number from 0 to below 1"),
    ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs must be an integer from 2 to 16, got 1"),
    ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx must be an integer from 0 to 3, got 4"),
    ("gemma3n", {"altup_coef_clip": -1}, "altup_coef_clip must be a finite number above 0, got -1"),
    ("gemma3n", {"altup_correct_scale": 1}, "altup_correct_scale must be true or false, got 1"),
    ("gemma3n", {"laurel_rank": 0}, "laurel_rank must be an integer from 1 to"),
    ("gemma3n", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input must be an integer from 1 to"),
    ("gemma3n", {"num_kv_shared_layers": 5}, "num_kv_shared_layers must be below num_hidden_layers (5), got 5"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": {}}},
        "rope_parameters.sliding_attention must be an object",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_gemma_reads_gelu_as_its_tanh_approximation() -> None:
    for name in ("gelu", "gelu_pytorch_tanh", None, LEFT_OUT):
        assert spec_of("gemma", hidden_act=name).layers[0].block("ffn").mixer == Dense(160, "gelu_tanh")
    # Gemma 2 uses the activation as named, and reads no other field.
    assert spec_of("gemma2", hidden_activation="gelu").layers[0].block("ffn").mixer == Dense(160, "gelu")
    assert spec_of("gemma2", hidden_act="relu").layers[0].block("ffn").mixer == Dense(160, "gelu_tanh")


def test_gemma_defaults() -> None:
    fields = ("head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    spec = spec_of("gemma", num_attention_heads=16, **dict.fromkeys(fields, LEFT_OUT))
    assert (heads(spec).kv_heads, heads(spec).key_dim, spec.max_position_embeddings) == (16, 256, 8192)
    assert spec.final_norm == RmsNorm(1e-6, weight_offset=1.0)
    assert (spec.embedding.scale, spec.lm_head) == (8.0, LmHead(tied=True))


def test_gemma2_windows_and_soft_caps() -> None:
    fields = ("layer_types", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    spec = spec_of("gemma2", num_key_value_heads=LEFT_OUT, **dict.fromkeys(fields, LEFT_OUT))
    assert windows(spec) == [4096, None, 4096]
    assert (spec.layers[0].attention.softcap, spec.lm_head) == (50.0, LmHead(tied=True, softcap=30.0))
    bare = spec_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (bare.layers[0].attention.softcap, bare.lm_head) == (None, LmHead(tied=True))
    assert spec_of("gemma2", query_pre_attn_scalar=LEFT_OUT).layers[0].attention.scale == 1 / 16


def test_gemma3_old_config_spelling() -> None:
    """Five of six layers have windows and a separate RoPE base; scaling is for the others."""
    old = {"layer_types": LEFT_OUT, "rope_parameters": LEFT_OUT, "_sliding_window_pattern": LEFT_OUT}
    scaling = {"rope_type": "linear", "factor": 8.0}
    spec = spec_of("gemma3", **old, rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling=scaling)
    assert windows(spec) == [16, 16, 16, 16, 16, None, 16]
    local, full = (spec.ropes[spec.layers[index].attention.rope or 0] for index in (0, 5))
    assert (local.theta, local.scaling) == (3e4, NoScaling())
    assert (full.theta, full.scaling) == (2e6, LinearScaling(8.0))
    assert windows(spec_of("gemma3", **old, sliding_window_pattern=2))[:4] == [16, None, 16, None]
    bare = spec_of("gemma3", **old)
    assert [bare.ropes[bare.layers[index].attention.rope or 0].theta for index in (0, 5)] == [1e4, 1e6]
    assert bare == spec_of("gemma3")


def test_embedding_gemma_attends_in_both_directions() -> None:
    spec = spec_of("gemma3", architectures=["Gemma3TextModel"], use_bidirectional_attention=True)
    assert not spec.causal
    assert windows(spec)[0] == 9  # the token itself and 8 on either side


def test_gemma4_layers_differ_in_their_heads() -> None:
    spec = spec_of("gemma4_kv")
    layers = [layer.attention.projections for layer in spec.layers]
    assert [
        (each.kv_heads, each.key_dim, each.values_are_keys) for each in layers if isinstance(each, HeadProjections)
    ] == [
        *[(2, 16, False)] * 4,
        (1, 24, True),
    ]
    assert {layer.scalar for layer in spec.layers} == {True}
    # A quarter of the pairs of a head of 24 rotate.
    assert [(rope.rotary_dim, rope.scaling) for rope in spec.ropes] == [(16, NoScaling()), (24, ProportionalScaling(3))]
    same = spec_of("gemma4_kv", attention_k_eq_v=False).layers[-1].attention.projections
    assert isinstance(same, HeadProjections)
    assert (same.kv_heads, same.key_dim, same.values_are_keys) == (2, 24, False)


def test_gemma4_per_layer_config_gives_the_heads_of_layers() -> None:
    """transformers 5 writes it in place of `global_head_dim` and `num_global_key_value_heads`."""
    gone = {"global_head_dim": LEFT_OUT, "num_global_key_value_heads": LEFT_OUT}
    heads = {"04": {"head_dim": 24, "num_key_value_heads": 1}}
    assert spec_of("gemma4_kv", **gone, per_layer_config=heads) == spec_of("gemma4_kv")
    full = {str(layer): {"head_dim": 24} for layer in (2, 5)}
    assert spec_of("gemma4_e", **gone, per_layer_config=full) == spec_of("gemma4_e")
    assert {heads.key_dim for heads in projections_of(spec_of("gemma4_e", per_layer_config={}))} == {16}
    with pytest.raises(UnsupportedModelError, match=r"per_layer_config\.4\.intermediate_size must be missing"):
        spec_of("gemma4_kv", per_layer_config={"4": {"intermediate_size": 8}})
    with pytest.raises(UnsupportedModelError, match="per_layer_config must be missing, because all layers of this"):
        spec_of("gemma3", per_layer_config={"1": {"head_dim": 8}})


def projections_of(spec: ModelSpec) -> list[HeadProjections]:
    """Projections of all layers."""
    found = [layer.attention.projections for layer in spec.layers]
    return [each for each in found if isinstance(each, HeadProjections)]


def test_gemma4_reads_keys_and_values_of_the_last_layer_of_the_type() -> None:
    spec = spec_of("gemma4_e")
    assert [layer.attention.kv_layer for layer in spec.layers] == [None, None, None, 1, 1, 2]
    networks = [layer.block("ffn").mixer for layer in spec.layers]
    assert [each.intermediate_size for each in networks if isinstance(each, Dense)] == [48, 48, 48, 96, 96, 96]
    assert not any(f"layers.{index}.attention.k" in role for role in spec.tensors for index in (3, 4, 5))
    assert all(layer.attention.kv_layer is None for layer in spec_of("gemma4_e", num_kv_shared_layers=None).layers)
    narrow = spec_of("gemma4_e", use_double_wide_mlp=LEFT_OUT).layers[-1].block("ffn").mixer
    assert narrow == networks[0]


def test_gemma4_per_layer_embeddings() -> None:
    spec = spec_of("gemma4_e")
    assert spec.tables == [Table(320, 6 * 8)]
    columns = [mixer.first_column for layer in spec.layers for mixer in layer.mixers(PerLayerEmbedding)]
    assert columns == [0, 8, 16, 24, 32, 40]
    assert spec.tensors["layers.2.per_layer.projection.weight"].part == Part(16, 8, 48)
    without = spec_of("gemma4_e", hidden_size_per_layer_input=0)
    assert (without.tables, without.layers[0].mixers(PerLayerEmbedding)) == ([], [])
    fields = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    assert spec_of("gemma4_e", **dict.fromkeys(fields, LEFT_OUT)).tables == [Table(262_144, 6 * 256)]


def test_gemma4_last_layer_has_full_attention() -> None:
    spec = spec_of("gemma4_ple", layer_types=["sliding_attention"] * 4)
    assert windows(spec) == [24, 24, 24, None]


def test_gemma4_experts_are_beside_the_dense_network() -> None:
    for layer in spec_of("gemma4_moe").layers:
        assert [(block.name, block.parallel, block.norm is None) for block in layer.blocks] == [
            ("attention", False, False),
            ("moe", False, True),
            ("ffn", True, False),
        ]
        assert layer.block("moe").joint_norm is not None


def test_gemma3n_networks_differ_by_layer() -> None:
    def networks(**changes: Any) -> list[tuple[int, float]]:
        found = [layer.block("ffn").mixer for layer in spec_of("gemma3n", **changes).layers]
        return [(each.intermediate_size, each.gate_cutoff or 0.0) for each in found if isinstance(each, Dense)]

    cutoff = NormalDist().inv_cdf(0.8)
    assert networks() == [(48, cutoff), (48, cutoff), (48, 0.0), (48, 0.0), (48, 0.0)]
    assert networks(intermediate_size=64, activation_sparsity_pattern=None) == [(64, 0.0)] * 5
    assert networks(intermediate_size=[8, 16, 24, 32, 40], activation_sparsity_pattern=0.5) == [
        (width, 0.0) for width in (8, 16, 24, 32, 40)
    ]
    fields = ("intermediate_size", "activation_sparsity_pattern", "layer_types")
    deep = networks(num_hidden_layers=12, num_kv_shared_layers=2, **dict.fromkeys(fields, LEFT_OUT))
    assert deep == [(16_384, NormalDist().inv_cdf(0.95))] * 10 + [(16_384, 0.0)] * 2


def test_gemma3n_streams() -> None:
    spec = spec_of("gemma3n", altup_num_inputs=3, altup_active_idx=1, altup_correct_scale=False, altup_coef_clip=None)
    assert spec.streams == Streams(3, ProjectedEnds(1e-5))
    assert [(span.name, span.blocks) for span in spec.layers[0].spans] == [("altup", 3), ("side", 1)]
    assert [span.mix for span in spec.layers[0].spans] == [Alternating(1, RmsNorm(1e-6)), Side(1)]
    assert not any("side.scale" in role for role in spec.tensors)
    assert spec.tensors["streams.end.2.weight"].names == ("model.altup_unembed_projections.1.weight",)


def test_gemma3n_old_and_new_config_spelling() -> None:
    full, sliding = {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0}, {"rope_theta": 3e4}
    old = spec_of(
        "gemma3n", rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling={"rope_type": "linear", "factor": 8}
    )
    new = {"full_attention": full, "sliding_attention": sliding | {"rope_type": "default"}}
    fields = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), LEFT_OUT)
    assert old == spec_of("gemma3n", **fields, rope_parameters=new)
    assert [rope.theta for rope in spec_of("gemma3n", **fields).ropes] == [1e4, 1e6]
    defaults = ("head_dim", "num_kv_shared_layers", "layer_types")
    changes = {"num_hidden_layers": 20, "intermediate_size": 48, "activation_sparsity_pattern": LEFT_OUT}
    spec = spec_of("gemma3n", **changes, **dict.fromkeys(defaults, LEFT_OUT))
    assert [layer.attention.kv_layer for layer in spec.layers] == [None] * 5 + ([3] * 4 + [4]) * 3
