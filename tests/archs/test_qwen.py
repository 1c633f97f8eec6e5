"""Qwen2-MoE and Qwen3-MoE: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, experts, heads, last_experts, spec_of, windows
from ferrule.archs.spec import Dense, Experts, Router

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
    ("qwen2_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of integers from 0"),
    (
        "qwen2_moe",
        {"layer_types": ["sliding_attention"] * 3},
        "sliding_window must be an integer, and enabled, because the model has sliding layers, got 0",
    ),
    ("qwen3_moe", {"num_local_experts": "6"}, "num_local_experts must be an integer from 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe"])
def test_qwen_moe_dense_layers(case: str) -> None:
    def sparse(**changes: Any) -> list[bool]:
        return [found is not None for found in experts(spec_of(case, num_hidden_layers=4, layer_types=None, **changes))]

    assert sparse() == [True] * 4
    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1, 9]) == [False, False, False, True]
    assert spec_of(case, mlp_only_layers=[0]).layers[0].block("ffn").mixer == Dense(160)


def test_qwen_moe_windows() -> None:
    switched = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 4}
    assert windows(spec_of("qwen2_moe", **switched, layer_types=None, max_window_layers=3)) == [8, None, 8, None]
    assert windows(spec_of("qwen2_moe", **switched, layer_types=None, max_window_layers=1)) == [8, None, None, None]
    assert windows(spec_of("qwen3_moe", **switched)) == [8] * 4
    assert windows(spec_of("qwen3_moe", **{**switched, "use_sliding_window": False})) == [None] * 4


def test_qwen_moe_shared_expert() -> None:
    spec = spec_of("qwen2_moe", qkv_bias=False)
    assert last_experts(spec) == Experts(6, 2, Dense(48), Router(), shared=Dense(80), shared_gate=True)
    assert not heads(spec).bias
    assert last_experts(spec_of("qwen3_moe", num_local_experts=LEFT_OUT, num_experts=7)).experts == 7
    assert last_experts(spec_of("qwen3_moe")).router == Router(normalize=True)
