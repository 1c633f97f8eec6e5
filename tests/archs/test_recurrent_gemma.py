"""RecurrentGemma: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule.archs.spec import Attention, Dense, HeadProjections, LmHead, RgLru, Stack, Tensor

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("recurrent_gemma", {"block_types": ["mamba"]}, "block_types must be a list of recurrent and attention"),
    ("recurrent_gemma", {"lru_width": 66}, "lru_width must be a multiple of num_attention_heads (4), got 66"),
    ("recurrent_gemma", {"conv1d_width": 0}, "conv1d_width must be an integer from 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_kinds_of_layers_repeat() -> None:
    spec = spec_of("recurrent_gemma", num_hidden_layers=6)
    assert [len(layer.mixers(Attention)) for layer in spec.layers] == [0, 0, 1, 0, 0, 1]
    attention = spec.layers[2].attention
    assert (attention.window, attention.output_bias, attention.projections) == (40, True, HeadProjections(1, 16, 16))
    assert [rope.rotary_dim for rope in spec.ropes] == [8]
    wide = spec_of("recurrent_gemma", head_dim=32)
    assert (wide.layers[2].attention.projections, wide.ropes[0].rotary_dim) == (HeadProjections(1, 32, 32), 16)
    assert spec.layers[0].mixers(RgLru) == [RgLru(64, 4, 4, "gelu_tanh")]
    assert spec.layers[0].mixers(Dense) == [Dense(96, "gelu_tanh", bias=True)]
    assert spec.lm_head == LmHead(tied=True, softcap=30.0)


def test_embedding_scale_is_rounded_to_bf16() -> None:
    assert spec_of("recurrent_gemma", hidden_size=2560, lru_width=LEFT_OUT, head_dim=256).embedding.scale == 50.5


def test_gates_are_stacked_by_head() -> None:
    tensors = spec_of("recurrent_gemma").tensors
    at = "model.layers.1.temporal_block.rg_lru"
    found = tensors["layers.1.rg_lru.heads.2.decay_gate.weight"]
    assert found == Tensor((f"{at}.recurrent_gate_weight",), transposed=True, stack=Stack(2, 4))
    assert tensors["layers.1.rg_lru.heads.2.input_gate.bias"] == Tensor((f"{at}.input_gate_bias",), stack=Stack(2, 4))
