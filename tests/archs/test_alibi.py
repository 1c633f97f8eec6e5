"""Families with ALiBi: BLOOM, MPT and Falcon: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, projections, qkv_parts, spec_of
from ferrule import UnsupportedModelError
from ferrule.archs.alibi import alibi_slopes
from ferrule.archs.spec import Part

NEW = {"new_decoder_architecture": True, "num_attention_heads": 8}
FALCONS: list[tuple[str, dict[str, Any], int, bool, str | None, Part]] = [
    ("7B", {}, 1, True, None, Part(64, 16, 96)),
    ("7B, one after the other", {"parallel_attn": False}, 1, False, "post_attention_layernorm", Part(64, 16, 96)),
    ("1B", {"multi_query": False, "num_kv_heads": 2}, 4, True, None, Part(16, 16, 48)),
    ("40B", NEW | {"num_kv_heads": 2}, 2, True, "ln_mlp", Part(32, 8, 48)),
    ("40B, one switch ignored", NEW | {"num_kv_heads": 2, "parallel_attn": False}, 2, True, "ln_mlp", Part(32, 8, 48)),
    ("11B", NEW | {"num_kv_heads": 4, "num_ln_in_parallel_attn": 1}, 4, True, None, Part(16, 8, 32)),
    ("as many keys as queries", NEW | {"num_kv_heads": LEFT_OUT}, 8, True, "ln_mlp", Part(8, 8, 24)),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mpt", {"no_bias": False}, "no_bias must be true, got False"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale must be null, got 'inv_sqrt_d_model'"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type must be layernorm or low_precision_layernorm, got 'rmsnorm'"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi must be true, got False"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln must be false, got True"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm must be false, got True"),
    (
        "mpt",
        {"attn_config": {"attn_type": "multiquery_attention"}},
        "attn_config.attn_type must be \"multihead_attention\", got 'multiquery_attention'",
    ),
    ("mpt", {"attn_config": {"clip_qkv": -1}}, "attn_config.clip_qkv must be a finite number from 0, got -1"),
    ("mpt", {"attn_config": {"alibi_bias_max": 0}}, "attn_config.alibi_bias_max must be a finite number"),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3},
        "num_kv_heads must be a divisor of num_attention_heads (4), got 3",
    ),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
        "num_ln_in_parallel_attn must be an integer from 1 to 2, got 3",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_mpt_unsupported_values_raise_unsupported_model_error() -> None:
    with pytest.raises(UnsupportedModelError):
        spec_of("mpt", no_bias=False)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71, 112])
def test_alibi_slopes_follow_the_paper(heads: int) -> None:
    """Press et al. use the slopes for the next lower power of two, then every second slope for the next higher one."""

    def of_power(count: int) -> list[float]:
        first = 2 ** (-8 / count)
        return [first ** (index + 1) for index in range(count)]

    lower = 1 << (heads.bit_length() - 1)
    expected = of_power(lower) + of_power(2 * lower)[::2][: heads - lower]
    assert alibi_slopes(heads) == pytest.approx(expected, rel=1e-12)


def test_bloom_old_config_spelling() -> None:
    spec = spec_of("bloom", hidden_size=LEFT_OUT, n_embed=128, seq_length=512)
    assert (spec.hidden_size, spec.max_position_embeddings) == (128, 512)
    assert spec_of("bloom").max_position_embeddings == 2048
    assert spec_of("bloom", apply_residual_connection_post_layernorm=True).layers[0].block("ffn").residual_after_norm


def test_mpt_original_config_spelling() -> None:
    changes = {"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": True, "alibi_bias_max": 16, "clip_qkv": 6}}
    layer = spec_of("mpt", **changes).layers[0]
    assert layer.attention.alibi_slopes == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
    assert (layer.attention.scale, projections(layer).clip) == (0.25, 6)
    layer = spec_of("mpt", attn_config={"clip_qkv": 0, "softmax_scale": 0.5}).layers[0]
    assert layer.attention.alibi_slopes == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
    assert (layer.attention.scale, projections(layer).clip) == (0.5, None)


@pytest.mark.parametrize(
    ("changes", "kv_heads", "parallel", "ffn_norm", "keys"), [case[1:] for case in FALCONS], ids=[c[0] for c in FALCONS]
)
def test_falcon_variants(
    changes: dict[str, Any], kv_heads: int, parallel: bool, ffn_norm: str | None, keys: Part
) -> None:
    spec = spec_of("falcon", **changes)
    layer = spec.layers[0]
    assert (projections(layer).kv_heads, layer.block("ffn").parallel) == (kv_heads, parallel)
    assert qkv_parts(spec)[1] == keys
    if ffn_norm is None:
        assert layer.block("ffn").norm is None
    else:
        assert spec.tensors["layers.0.ffn_norm.weight"].names == (f"transformer.h.0.{ffn_norm}.weight",)
    before = "ln_attn" if ffn_norm == "ln_mlp" else "input_layernorm"
    assert spec.tensors["layers.0.attention_norm.weight"].names == (f"transformer.h.0.{before}.weight",)


def test_falcon_scales_alibi_slopes_with_the_scores() -> None:
    spec = spec_of("falcon", alibi=True)
    assert spec.layers[0].attention.alibi_slopes == (2.0**-4, 2.0**-6, 2.0**-8, 2.0**-10)
    assert (spec.layers[0].attention.rope, spec.ropes) == (None, [])
