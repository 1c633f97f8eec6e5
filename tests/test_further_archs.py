"""Further families: what each reads from its config.json in a way of its own, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ferrule import ConfigError, UnsupportedModelError
from ferrule.archs import model_spec
from ferrule.archs.config import Config
from ferrule.archs.spec import (
    Dense,
    DynamicScaling,
    Experts,
    HeadProjections,
    LatentProjections,
    LayerNorm,
    LearnedPositions,
    Llama3Scaling,
    ModelSpec,
    NoScaling,
    RmsNorm,
    Rope,
    Router,
    Tensor,
    YarnScaling,
)

VARIANTS = Path(__file__).parent / "golden" / "variants"
LEFT_OUT = object()


def spec_of(case: str, **changes: Any) -> ModelSpec:
    """The spec of a golden case with other values; LEFT_OUT is for fields to leave out, None for null ones."""
    values = {**json.loads((VARIANTS / case / "config.json").read_text()), **changes}
    kept = {key: value for key, value in values.items() if value is not LEFT_OUT}
    return model_spec(Config(kept, Path("config.json")))


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def ropes(spec: ModelSpec) -> list[Rope | None]:
    indices = [layer.attention.rope for layer in spec.layers]
    return [None if index is None else spec.ropes[index] for index in indices]


def mixtures(spec: ModelSpec) -> list[Experts | None]:
    return [layer.ffn if isinstance(layer.ffn, Experts) else None for layer in spec.layers]


def sparse(spec: ModelSpec) -> list[bool]:
    return [mixture is not None for mixture in mixtures(spec)]


def heads(spec: ModelSpec) -> HeadProjections:
    projections = spec.layers[0].attention.projections
    assert isinstance(projections, HeadProjections)
    return projections


DEFAULTS: list[tuple[str, tuple[float, float, int]]] = [
    ("arcee", (1e-5, 10_000, 4096)),
    ("ernie4_5", (1e-5, 500_000, 131_072)),
    ("exaone4_no_window", (1e-5, 10_000, 2048)),
    ("glm4_moe", (1e-5, 10_000, 131_072)),
    ("helium", (1e-8, 100_000, 4096)),
    ("internlm3", (1e-5, 10_000, 32_768)),
    ("minimax_m2", (1e-6, 5_000_000, 196_608)),
    ("seed_oss", (1e-6, 10_000, 524_288)),
    ("solar_open", (1e-5, 1_000_000, 131_072)),
]


@pytest.mark.parametrize(("case", "expected"), DEFAULTS)
def test_what_a_file_leaves_out_is_as_in_the_class_of_its_family(case: str, expected: tuple[float, float, int]) -> None:
    """eps, the base of the rotation, and the context."""
    gone = ("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "max_position_embeddings")
    spec = spec_of(case, **dict.fromkeys(gone, LEFT_OUT))
    norm, rope = spec.final_norm, ropes(spec)[0]
    assert isinstance(norm, RmsNorm)
    assert rope is not None
    assert (norm.eps, rope.theta, spec.max_position_embeddings) == expected


def test_key_value_heads_that_are_left_out() -> None:
    for case, expected in (("mistral_nemo", 8), ("qwen2_sliding", 32)):
        spec = spec_of(case, num_key_value_heads=LEFT_OUT, num_attention_heads=64, hidden_size=1024, head_dim=16)
        assert heads(spec).kv_heads == expected
    assert heads(spec_of("mistral_nemo", num_key_value_heads=None)).kv_heads == 4


def test_activations_that_are_no_silu() -> None:
    for case in ("arcee", "nemotron", "jais2", "persimmon"):
        ffn = spec_of(case, hidden_act=LEFT_OUT).layers[0].ffn
        assert isinstance(ffn, Dense)
        assert (ffn.activation, ffn.gated) == ("relu2", False), case


def test_nemotrons_norms_are_offsets_from_1() -> None:
    assert spec_of("nemotron").final_norm == LayerNorm(1e-5, weight_offset=1.0)
    assert spec_of("nemotron", partial_rotary_factor=LEFT_OUT).ropes[0].rotary_dim == 8


def test_olmo_3_scales_the_rotation_of_layers_without_a_window_alone() -> None:
    for spec in (spec_of("olmo3"), spec_of("olmo3", layer_types=LEFT_OUT)):
        assert windows(spec) == [16, 16, 16, None]
        kinds = [type(rope.scaling) for rope in ropes(spec) if rope is not None]
        assert kinds == [NoScaling, NoScaling, NoScaling, YarnScaling]
        assert {rope.theta for rope in ropes(spec) if rope is not None} == {500_000}


def test_exaone_rotates_beside_a_window_alone() -> None:
    spec = spec_of("exaone4")
    assert windows(spec) == [16, 16, 16, None]
    assert [rope is not None for rope in ropes(spec)] == [True, True, True, False]
    assert [rope is not None for rope in ropes(spec_of("exaone4_no_window"))] == [True, True]
    assert windows(spec_of("exaone4", layer_types=LEFT_OUT, sliding_window_pattern=2)) == [16, None, 16, None]
    with pytest.raises(ConfigError, match="sliding_window_pattern is 'LLLG'; it must be a whole number"):
        spec_of("exaone4", layer_types=LEFT_OUT)
    with pytest.raises(ConfigError, match="sliding_window is None; it must be a whole number"):
        spec_of("exaone4", sliding_window=None)


def test_hunyuans_alpha_is_another_base() -> None:
    (rope,) = spec_of("hunyuan_v1_dense").ropes
    assert (rope.rotary_dim, rope.scaling) == (16, NoScaling())
    assert rope.theta == pytest.approx(10_000 * 50 ** (16 / 14))
    dynamic = spec_of("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "factor": 2.0, "alpha": 0})
    assert isinstance(dynamic.ropes[0].scaling, DynamicScaling)
    assert spec_of("hunyuan_v1_dense", rope_scaling=None).ropes == [Rope(10_000.0, rotary_dim=16)]
    for alpha in (1e37, 1e300):
        with pytest.raises(ConfigError, match=r"rope_scaling\.alpha is 1e\+\d+; it must be small enough"):
            spec_of("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": alpha})
    with pytest.raises(ConfigError, match="an even number of elements is rotated, not 15"):
        spec_of("hunyuan_v1_dense", head_dim=15)


def test_hunyuans_mixtures_have_numbers_by_layer() -> None:
    found = [mixture for mixture in mixtures(spec_of("hunyuan_v1_moe")) if mixture is not None]
    assert [(mixture.experts, mixture.experts_per_token) for mixture in found] == [(6, 2), (6, 3)]
    with pytest.raises(ConfigError, match=r"moe_topk is \[2\]; it must be a whole number, or a list of 2"):
        spec_of("hunyuan_v1_moe", moe_topk=[2])
    with pytest.raises(ConfigError, match=r"moe_topk is \[2, 0\]; it must be a list of whole numbers from 1"):
        spec_of("hunyuan_v1_moe", moe_topk=[2, 0])


WRONG_TYPES: list[Any] = [
    *([[["global"], 3]], [[["far"], 2]], [["global", 2]], [[["global"], "2"]], [[[1], 2]], [[[], 2]], [7], "global"),
]


@pytest.mark.parametrize("types", WRONG_TYPES)
def test_gpt_neos_lists_of_windows_that_are_none(types: Any) -> None:
    with pytest.raises(ConfigError, match=r"attention_types is .*; it must be lists of global and local"):
        spec_of("gpt_neo", attention_types=types)


def test_gpt_neo_lists_its_windows_run_by_run() -> None:
    spec = spec_of("gpt_neo", attention_types=[[["local"], 1], [["global"], 1]])
    assert windows(spec) == [16, None]
    assert spec.layers[0].attention.scale == 1
    assert spec.embedding.positions == LearnedPositions(256)
    assert windows(spec_of("gpt_neo", num_layers=24, attention_types=LEFT_OUT)) == [None, 16] * 12


def test_ernies_mixtures_begin_end_and_skip() -> None:
    assert sparse(spec_of("ernie4_5_moe")) == [False, True, True]
    assert sparse(spec_of("ernie4_5_moe", moe_layer_start_index=0, moe_layer_end_index=1)) == [True, True, False]
    skipping = {"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 2}
    assert sparse(spec_of("ernie4_5_moe", **skipping)) == [False, True, False]
    mixture = mixtures(spec_of("ernie4_5_moe"))[1]
    assert mixture is not None
    assert mixture.router == Router(normalize=True, correction_bias=True)
    assert mixture.shared == Dense(64, "silu")
    last = mixtures(spec_of("ernie4_5_moe", moe_num_shared_experts=0))[2]
    assert last is not None
    assert last.shared is None
    with pytest.raises(UnsupportedModelError, match=r"moe_norm_min is 0\.1; it must be at most 1e-06"):
        spec_of("ernie4_5_moe", moe_norm_min=0.1)


def test_lists_of_mixtures() -> None:
    for case in ("exaone_moe", "glm4_moe_lite"):
        count = len(spec_of(case).layers)
        assert sparse(spec_of(case)) == [False] + [True] * (count - 1)
        assert sparse(spec_of(case, mlp_layer_types=LEFT_OUT)) == [False] + [True] * (count - 1)
        kinds = ["sparse"] * (count - 1) + ["dense"]
        assert sparse(spec_of(case, mlp_layer_types=kinds)) == [True] * (count - 1) + [False]
        for wrong in (["sparse"], ["wide"] * count):
            with pytest.raises(ConfigError, match=rf"mlp_layer_types is .*; it must be a list of {count}, each one"):
                spec_of(case, mlp_layer_types=wrong)
    assert sparse(spec_of("exaone_moe", mlp_layer_types=LEFT_OUT, first_k_dense_replace=3)) == [False] * 3 + [True]
    assert sparse(spec_of("solar_open", first_k_dense_replace=1)) == [True, True], "as in transformers"


def test_minimax_counts_rotated_elements() -> None:
    assert spec_of("minimax_m2").ropes[0].rotary_dim == 8
    assert spec_of("minimax_m2", rotary_dim=LEFT_OUT).ropes[0].rotary_dim == 16
    assert spec_of("minimax_m2", partial_rotary_factor=0.25).ropes[0].rotary_dim == 4
    with pytest.raises(ConfigError, match="rotary_dim is 18; it must be a whole number from 2 to 16"):
        spec_of("minimax_m2", rotary_dim=18)


def test_granites_shared_network_may_be_missing() -> None:
    (first, _) = mixtures(spec_of("granitemoeshared"))
    assert first is not None
    assert first.shared == Dense(64, "silu")
    (first, _) = mixtures(spec_of("granitemoeshared", shared_intermediate_size=0))
    assert first is not None
    assert first.shared is None


def test_minicpms_factors() -> None:
    spec = spec_of("minicpm3", scale_depth=LEFT_OUT, dim_model_base=LEFT_OUT)
    assert spec.head is not None
    assert (spec.layers[0].residual_scale, spec.head.scale) == (1.4 / math.sqrt(2), 256 / 64)
    spec = spec_of("minicpm3", scale_depth=None, dim_model_base=None, scale_emb=3, v_head_dim=None)
    projections = spec.layers[0].attention.projections
    assert spec.head is not None
    assert isinstance(projections, LatentProjections)
    assert (spec.layers[0].residual_scale, spec.head.scale, spec.embedding.scale) == (1, 1, 3)
    assert projections.value_dim == 16


def test_cwm_without_a_rotation_has_that_of_its_makers() -> None:
    spec = spec_of("cwm", rope_parameters=LEFT_OUT, layer_types=LEFT_OUT, max_position_embeddings=LEFT_OUT)
    assert windows(spec) == [None, 16, 16]
    (rope,) = spec.ropes
    assert (rope.theta, type(rope.scaling)) == (1e6, Llama3Scaling)
    plain = spec_of("cwm", rope_parameters=LEFT_OUT, rope_scaling={"type": "linear", "factor": 2.0})
    assert type(plain.ropes[0].scaling) is not Llama3Scaling


def test_dots_has_windows_from_a_layer_on() -> None:
    assert windows(spec_of("dots1", layer_types=LEFT_OUT)) == [None, None]
    switched = spec_of("dots1", layer_types=LEFT_OUT, sliding_window=16, max_window_layers=1)
    assert windows(switched) == [None, 16]


def test_ministral_has_windows_where_nothing_is_listed() -> None:
    assert windows(spec_of("ministral")) == [None, 16]
    assert windows(spec_of("ministral", layer_types=LEFT_OUT)) == [16, 16]
    assert windows(spec_of("ministral", layer_types=LEFT_OUT, sliding_window=None)) == [None, None]


def test_what_stands_around_the_blocks() -> None:
    hyperclovax = spec_of("hyperclovax").layers[0]
    assert hyperclovax.attention_norm == hyperclovax.attention_post_norm == RmsNorm(1e-6)
    assert spec_of("hyperclovax", use_post_norm=False).layers[0].attention_post_norm is None
    vault = spec_of("vaultgemma").layers[0]
    assert vault.ffn_norm == RmsNorm(1e-6, weight_offset=1.0)
    assert vault.ffn_post_norm is None
    flex = spec_of("flex_olmo").layers[0]
    assert (flex.attention_norm, flex.attention_post_norm) == (None, RmsNorm(1e-6))


def test_biases_have_switches_of_their_own() -> None:
    internlm = spec_of("internlm3", qkv_bias=False)
    assert (heads(internlm).bias, internlm.layers[0].attention.output_bias) == (False, True)
    seed = spec_of("seed_oss", attention_bias=LEFT_OUT, attention_out_bias=True)
    assert (heads(seed).bias, seed.layers[0].attention.output_bias) == (True, True)
    helium = spec_of("helium", attention_bias=True)
    assert (heads(helium).bias, helium.layers[0].attention.output_bias) == (True, False)


def test_correction_biases_have_many_names() -> None:
    names = {
        "dots1": "model.layers.1.mlp.gate.e_score_correction_bias",
        "ernie4_5_moe": "model.layers.1.mlp.moe_statics.e_score_correction_bias",
        "exaone_moe": "model.layers.1.mlp.e_score_correction_bias",
        "minimax_m2": "model.layers.1.block_sparse_moe.e_score_correction_bias",
    }
    for case, name in names.items():
        assert spec_of(case).tensors["layers.1.ffn.router.correction_bias"] == Tensor((name,))
