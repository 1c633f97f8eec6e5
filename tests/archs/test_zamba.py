"""Zamba 2: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule.archs.spec import Attention, Dense, HeadProjections, LowRank, Mamba2, ModelSpec, Part, RmsNorm, Tensor

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("zamba2", {"layers_block_type": ["attention"] * 4}, "layers_block_type must be a list of mamba"),
    ("zamba2", {"num_attention_heads": 3}, "num_attention_heads must be a divisor of twice hidden_size (128), got 3"),
    ("zamba2", {"n_mamba_heads": 7}, "n_mamba_heads must be a divisor of mamba_expand * hidden_size (128), got 7"),
    ("zamba2", {"mamba_ngroups": 3}, "mamba_ngroups must be a divisor of the number of heads (8), got 3"),
    (
        "zamba2",
        {"num_key_value_heads": 2},
        "num_key_value_heads must be num_attention_heads (4) with attention adapters",
    ),
    ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks must be an integer from 1"),
    (
        "zamba2",
        {"num_hidden_layers": 5},
        "num_hidden_layers must be the number of layers in layers_block_type (4), got 5",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def owners(spec: ModelSpec) -> list[list[int | None]]:
    """Returns the layers with the weights of the attention and the network of each layer that has them."""
    return [[block.weights_of for block in layer.blocks[:2]] for layer in spec.layers if len(layer.blocks) > 1]


def test_shared_blocks_take_turns() -> None:
    spec = spec_of("zamba2")
    assert owners(spec) == [[None, None], [1, 1]]
    names = ["attention", "ffn", "projection", "mamba2"]
    assert [[block.name for block in layer.blocks] for layer in spec.layers] == [["mamba2"], names] * 2
    inputs = ["stream_and_embedding", "output", "output", "stream_plus_output"]
    assert [block.input for block in spec.layers[3].blocks] == inputs
    more = spec_of("zamba2", layers_block_type=["hybrid", "linear_attention", "hybrid", "hybrid"], num_mem_blocks=2)
    assert owners(more) == [[None, None], [None, None], [0, 0]]
    # As in transformers, whose switch for tied weights is the same for both.
    assert owners(spec_of("zamba2", tie_word_embeddings=False)) == [[None, None], [None, None]]
    third = more.tensors["layers.3.ffn.low_rank.0.a.weight"]
    assert third.names == ("model.layers.0.shared_transformer.feed_forward.gate_up_proj_adapter_list.2.0.weight",)
    usual = spec_of("zamba2", layers_block_type=LEFT_OUT, num_hidden_layers=LEFT_OUT)
    assert len(usual.layers) == 54
    assert [index for index, layer in enumerate(usual.layers) if len(layer.blocks) > 1] == [*range(6, 48, 6), 47, 51]


def test_sizes() -> None:
    spec = spec_of("zamba2")
    attention = spec.layers[1].attention
    assert (attention.heads, attention.scale, attention.projections) == (4, 0.25, HeadProjections(4, 32, 32))
    assert [rope.rotary_dim for rope in spec.ropes] == [32]
    assert spec.layers[1].mixers(Dense) == [Dense(48, "gelu")]
    (mamba2,) = spec.layers[0].mixers(Mamba2)
    assert mamba2 == Mamba2(8, 16, 2, 16, 4, norm=RmsNorm(1e-5), norm_groups=2)
    plain = spec_of("zamba2", use_mem_rope=False, intermediate_size=None, use_long_context=True, add_bias_linear=True)
    assert (plain.ropes, plain.layers[1].attention.rope, plain.max_position_embeddings) == ([], None, 16_384)
    assert plain.layers[1].mixers(Dense) == [Dense(256, "gelu", bias=True)]


def test_adapters_belong_to_the_use() -> None:
    spec = spec_of("zamba2")
    assert [block.low_rank for block in spec.layers[3].blocks] == [
        (LowRank(("q",), 8), LowRank(("k",), 8), LowRank(("v",), 8)),
        (LowRank(("gate", "up"), 8),),
        (),
        (),
    ]
    at = "model.layers.1.shared_transformer"
    assert spec.tensors["layers.3.attention.low_rank.1.b.weight"] == Tensor(
        (f"{at}.self_attn.linear_k_adapter_list.1.1.weight",)
    )
    assert spec.tensors["layers.1.ffn.up.weight"] == Tensor(
        (f"{at}.feed_forward.gate_up_proj.weight",), part=Part(48, 48, 96)
    )
    assert "layers.3.ffn.up.weight" not in spec.tensors
    assert spec.tensors["layers.3.mamba2_norm.weight"].names == ("model.layers.3.mamba_decoder.input_layernorm.weight",)
    without = spec_of("zamba2", use_shared_attention_adapter=False, num_key_value_heads=2)
    assert (without.layers[3].blocks[0].low_rank, without.layers[3].mixers(Attention)[0].scale) == ((), 0.25)
