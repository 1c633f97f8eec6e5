"""Gemma 1 to 4 and VaultGemma: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, heads, spec_of, windows
from ferrule.archs.spec import Dense, HeadProjections, LinearScaling, LmHead, NoScaling, ProportionalScaling, RmsNorm

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
