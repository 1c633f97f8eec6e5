"""Mistral, Ministral, Mixtral and their successors: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, last_experts, spec_of, windows
from ferrule.archs.spec import Dense, Experts, Part, QueryGrowth, RmsNorm, Router, Stack

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
    (
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": -1}},
        "rope_parameters.llama_4_scaling_beta must be a finite number from 0, got -1",
    ),
    ("mistral4", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_mixtral_defaults() -> None:
    fields = ("num_local_experts", "num_experts_per_tok", "rms_norm_eps")
    spec = spec_of("mixtral", rope_parameters=LEFT_OUT, **dict.fromkeys(fields, LEFT_OUT))
    assert last_experts(spec) == Experts(8, 2, Dense(160), Router(normalize=True))
    assert (spec.final_norm, spec.ropes[0].theta, windows(spec)) == (RmsNorm(1e-5), 1e6, [None] * 3)
    assert windows(spec_of("mixtral", sliding_window=8)) == [8, 8, 8]
    assert last_experts(spec_of("mixtral", num_local_experts=LEFT_OUT, num_experts=5)).experts == 5


def test_ministral_has_windows_without_layer_types() -> None:
    assert windows(spec_of("ministral")) == [None, 16]
    assert windows(spec_of("ministral", layer_types=LEFT_OUT)) == [16, 16]
    assert windows(spec_of("ministral", layer_types=LEFT_OUT, sliding_window=None)) == [None, None]


def test_ministral_3_queries_grow_beyond_the_original_context() -> None:
    growth = QueryGrowth(0.1, length=32)
    assert [layer.attention.query_growth for layer in spec_of("ministral3").layers] == [growth] * 4
    plain = spec_of("ministral3", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert plain.layers[0].attention.query_growth is None
    assert windows(spec_of("ministral3", sliding_window=8)) == [8] * 4


def test_mistral_4_experts_and_scores() -> None:
    spec = spec_of("mistral4")
    assert last_experts(spec) == Experts(6, 2, Dense(16), Router(normalize=True), shared=Dense(16))
    up = spec.tensors["layers.1.ffn.experts.4.up.weight"]
    assert (up.part, up.stack) == (Part(16, 16, 32), Stack(4, 6))
    attention = spec.layers[0].attention
    assert (attention.query_growth, spec.ropes[0].rotary_dim) == (QueryGrowth(0.1, length=64), 16)
    dense = spec_of("mistral4", first_k_dense_replace=1)
    assert dense.layers[0].block("ffn").mixer == Dense(48)
