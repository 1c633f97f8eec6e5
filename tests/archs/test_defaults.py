"""Defaults and switches that differ between families: how config.json is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from archs.specs import GOLDEN, LEFT_OUT, folder_of, heads, ropes, sparse, spec_of
from ferrule import ConfigError
from ferrule.archs import model_spec
from ferrule.archs.config import Config
from ferrule.archs.spec import Dense, ModelSpec, RmsNorm, Tensor
from ferrule.archs.text_model import SIZES

WRITTEN: list[dict[str, Any]] = json.loads((GOLDEN / "defaults.json").read_text())
"""All fields of default configurations as transformers writes them; tools/make_golden/defaults.py makes the file."""
NOT_DEFAULT = ("model_type", "num_hidden_layers", "num_kv_shared_layers")
"""Fields in which those configurations differ from the default."""

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


def wrapped(text: dict[str, Any]) -> ModelSpec:
    """Spec of a multimodal model with this text model, whose sizes may be missing."""
    return model_spec(Config({"text_config": text}, Path("config.json")))


@pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written["model_type"])
def test_missing_fields_have_the_defaults_of_transformers(written: dict[str, Any]) -> None:
    given = {field: written[field] for field in NOT_DEFAULT if field in written}
    found, expected = wrapped(given), wrapped(written)
    names = [field.name for field in dataclasses.fields(ModelSpec)]
    differing = [name for name in names if getattr(found, name) != getattr(expected, name)]
    assert not differing


def test_default_sizes_are_those_of_transformers() -> None:
    assert [written["model_type"] for written in WRITTEN] == list(SIZES)


OLD_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names of kinds of layers in files of transformers 4."""
RENAMED = [
    *("bailing_hybrid", "exaone_moe_windows", "gemma4_kv", "granite_swa", "lfm2_moe", "lfm3", "mimo_v2_flash"),
    *("minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next_dense"),
]


@pytest.mark.parametrize("case", RENAMED)
def test_old_names_of_layer_types(case: str) -> None:
    types: list[str] = json.loads((folder_of(case) / "config.json").read_text())["layer_types"]
    old = [OLD_NAMES.get(kind, kind) for kind in types]
    assert old != types
    assert spec_of(case, layer_types=old) == spec_of(case)


@pytest.mark.parametrize(("case", "expected"), DEFAULTS)
def test_defaults_follow_the_family(case: str, expected: tuple[float, float, int]) -> None:
    """Default norm epsilon, RoPE base and context length follow the family."""
    gone = ("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "max_position_embeddings")
    spec = spec_of(case, **dict.fromkeys(gone, LEFT_OUT))
    norm, rope = spec.final_norm, ropes(spec)[0]
    assert isinstance(norm, RmsNorm)
    assert rope is not None
    assert (norm.eps, rope.theta, spec.max_position_embeddings) == expected


def test_default_key_value_heads() -> None:
    for case, expected in (("mistral_nemo", 8), ("qwen2_sliding", 32)):
        spec = spec_of(case, num_key_value_heads=LEFT_OUT, num_attention_heads=64, hidden_size=1024, head_dim=16)
        assert heads(spec).kv_heads == expected
    assert heads(spec_of("mistral_nemo", num_key_value_heads=None)).kv_heads == 4


def test_default_squared_relu() -> None:
    for case in ("arcee", "nemotron", "jais2", "persimmon"):
        ffn = spec_of(case, hidden_act=LEFT_OUT).layers[0].block("ffn").mixer
        assert isinstance(ffn, Dense)
        assert (ffn.activation, ffn.gated) == ("relu2", False), case


def test_mlp_layer_types() -> None:
    for case in ("exaone_moe", "glm4_moe_lite"):
        count = len(spec_of(case).layers)
        assert sparse(spec_of(case)) == [False] + [True] * (count - 1)
        assert sparse(spec_of(case, mlp_layer_types=LEFT_OUT)) == [False] + [True] * (count - 1)
        kinds = ["sparse"] * (count - 1) + ["dense"]
        assert sparse(spec_of(case, mlp_layer_types=kinds)) == [True] * (count - 1) + [False]
        for wrong in (["sparse"], ["wide"] * count):
            with pytest.raises(
                ConfigError, match=rf"mlp_layer_types must be a list of {count} items, each one of dense, sparse"
            ):
                spec_of(case, mlp_layer_types=wrong)
    assert sparse(spec_of("exaone_moe", mlp_layer_types=LEFT_OUT, first_k_dense_replace=3)) == [False] * 3 + [True]
    assert sparse(spec_of("solar_open", first_k_dense_replace=1)) == [True, True], "as in transformers"


def test_norms_around_blocks() -> None:
    hyperclovax = spec_of("hyperclovax").layers[0]
    assert hyperclovax.block("attention").norm == hyperclovax.block("attention").post_norm == RmsNorm(1e-6)
    assert spec_of("hyperclovax", use_post_norm=False).layers[0].block("attention").post_norm is None
    vault = spec_of("vaultgemma").layers[0]
    assert vault.block("ffn").norm == RmsNorm(1e-6, weight_offset=1.0)
    assert vault.block("ffn").post_norm is None
    flex = spec_of("flex_olmo").layers[0]
    assert (flex.block("attention").norm, flex.block("attention").post_norm) == (None, RmsNorm(1e-6))


def test_bias_switches() -> None:
    internlm = spec_of("internlm3", qkv_bias=False)
    assert (heads(internlm).bias, internlm.layers[0].attention.output_bias) == (False, True)
    seed = spec_of("seed_oss", attention_bias=LEFT_OUT, attention_out_bias=True)
    assert (heads(seed).bias, seed.layers[0].attention.output_bias) == (True, True)
    helium = spec_of("helium", attention_bias=True)
    assert (heads(helium).bias, helium.layers[0].attention.output_bias) == (True, False)


def test_names_of_router_correction_biases() -> None:
    names = {
        "dots1": "model.layers.1.mlp.gate.e_score_correction_bias",
        "ernie4_5_moe": "model.layers.1.mlp.moe_statics.e_score_correction_bias",
        "exaone_moe": "model.layers.1.mlp.e_score_correction_bias",
        "minimax_m2": "model.layers.1.block_sparse_moe.e_score_correction_bias",
    }
    for case, name in names.items():
        assert spec_of(case).tensors["layers.1.ffn.router.correction_bias"] == Tensor((name,))
