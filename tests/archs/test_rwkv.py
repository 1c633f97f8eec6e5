"""RWKV 4: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule._cli.layers import mixer_words
from ferrule.archs.spec import LayerNorm, LmHead, RwkvChannelMix, RwkvTimeMix, Tensor

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("rwkv", {"attention_hidden_size": 0}, "attention_hidden_size must be an integer from 1"),
    ("rwkv", {"intermediate_size": -1}, "intermediate_size must be an integer from 1"),
    ("rwkv", {"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a finite number above 0, got 0"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_widths_follow_the_hidden_size_by_default() -> None:
    spec = spec_of("rwkv", attention_hidden_size=LEFT_OUT, intermediate_size=LEFT_OUT)
    assert spec.layers[2].mixers(RwkvTimeMix) == [RwkvTimeMix(64, 64)]
    assert spec.layers[2].mixers(RwkvChannelMix) == [RwkvChannelMix(64, 256)]


def test_final_norm_has_its_own_epsilon() -> None:
    spec = spec_of("rwkv", layer_norm_epsilon=1e-3)
    assert (spec.embedding.norm, spec.final_norm) == (LayerNorm(1e-3), LayerNorm(1e-5))
    assert [block.norm for block in spec.layers[0].blocks] == [LayerNorm(1e-3)] * 2


def test_context_is_not_that_of_training() -> None:
    assert spec_of("rwkv").max_position_embeddings == 1 << 20
    assert spec_of("rwkv", max_position_embeddings=4096).max_position_embeddings == 4096


def test_first_norm_of_the_first_block_is_that_of_the_embedding() -> None:
    spec = spec_of("rwkv")
    assert spec.tensors["embedding_norm.bias"] == Tensor(("rwkv.blocks.0.pre_ln.bias",))
    assert spec.tensors["layers.1.time_mix.decay_log.weight"] == Tensor(("rwkv.blocks.1.attention.time_decay",))
    assert spec.tensors["lm_head.weight"] == Tensor(("head.weight",))
    assert spec_of("rwkv", tie_word_embeddings=True).lm_head == LmHead(tied=True)


def test_layers_in_words() -> None:
    words = [mixer_words(block.mixer, []) for block in spec_of("rwkv").layers[0].blocks]
    assert words == [("time mixing", "64 channels"), ("channel mixing", "gated relu2, 96 wide")]
