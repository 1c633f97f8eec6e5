"""gpt-oss: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, heads, last_experts, spec_of, windows
from ferrule.archs.spec import Clamp, Dense, LinearScaling, Part, Stack, Tensor, YarnScaling

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a finite number above 0"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_gpt_oss_defaults() -> None:
    fields = ("rope_parameters", "layer_types", "sliding_window", "swiglu_alpha", "swiglu_limit", "head_dim")
    spec = spec_of("gpt_oss", **dict.fromkeys(fields, LEFT_OUT))
    assert windows(spec) == [128, None, 128, None]
    assert last_experts(spec).expert == Dense(96, bias=True, clamp=Clamp(1.702, 7.0))
    assert (spec.ropes[0].theta, heads(spec).key_dim) == (150_000.0, 64)
    scaling = spec.ropes[0].scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings, scaling.truncate) == (32.0, 4096, False)
    assert spec_of("gpt_oss", rope_parameters=LEFT_OUT, rope_scaling={"rope_type": "linear", "factor": 2}).ropes[
        0
    ].scaling == LinearScaling(2.0)


def test_gpt_oss_interleaves_gate_and_up_rows() -> None:
    tensors = spec_of("gpt_oss").tensors
    at, stack = "model.layers.1.mlp.experts", Stack(3, 6)
    gate, up = (tensors[f"layers.1.ffn.experts.3.{role}.weight"] for role in ("gate", "up"))
    assert gate == Tensor((f"{at}.gate_up_proj",), transposed=True, part=Part(0, 1, 2), stack=stack)
    assert up == Tensor((f"{at}.gate_up_proj",), transposed=True, part=Part(1, 1, 2), stack=stack)
    bias = tensors["layers.1.ffn.experts.3.up.bias"]
    assert bias == Tensor((f"{at}.gate_up_proj_bias",), part=Part(1, 1, 2), stack=stack)
