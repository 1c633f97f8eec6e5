"""StableLM and StarCoder2: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, projections, spec_of
from ferrule.archs.spec import HeadNorm, LayerNorm

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("stablelm", {"num_key_value_heads": LEFT_OUT}, "num_key_value_heads must be a divisor"),
    ("starcoder2", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_stablelm_and_phi_qk_norms() -> None:
    assert projections(spec_of("phi", qk_layernorm=True).layers[0]).qk_norm == HeadNorm(LayerNorm(1e-5))
    spec = spec_of("stablelm", qk_layernorm=True, use_parallel_residual=True, rope_parameters=LEFT_OUT)
    assert projections(spec.layers[0]).qk_norm == HeadNorm(LayerNorm(1e-5, bias=False), over="each_head")
    norms = [spec.tensors[f"layers.1.attention.{role}_norm.weight"].names for role in ("q", "k")]
    at = "model.layers.1.self_attn"
    assert norms[0] == tuple(f"{at}.q_layernorm.norms.{head}.weight" for head in range(4))
    assert norms[1] == tuple(f"{at}.k_layernorm.norms.{head}.weight" for head in range(2))
    assert (spec.layers[0].block("ffn").parallel, spec.layers[0].block("ffn").norm) == (True, None)
    assert spec.ropes[0].rotary_dim == 4


def test_starcoder2_window() -> None:
    assert [layer.attention.window for layer in spec_of("starcoder2", sliding_window=8).layers] == [8, 8, 8]
    assert [layer.attention.window for layer in spec_of("starcoder2").layers] == [None, None, None]
    assert projections(spec_of("starcoder2", num_key_value_heads=LEFT_OUT).layers[0]).kv_heads == 2
