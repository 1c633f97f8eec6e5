"""Attention to chosen tokens: how config.json is read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, folder_of, latents, sparse, spec_of
from ferrule import ConfigError
from ferrule.archs.spec import Indexer, LayerNorm, ModelSpec, RmsNorm

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("glm_moe_dsa", {"indexer_types": ["full"] * 2}, "indexer_types must be the types of 3 layers"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types must be the types of 3 layers"),
    ("glm_moe_dsa", {"indexer_types": LEFT_OUT, "index_topk_pattern": "FXF"}, "index_topk_pattern must be the types"),
    ("glm_moe_dsa", {"indexer_types": LEFT_OUT, "index_topk_freq": 0}, "index_topk_freq must be an integer from 1"),
    ("glm_moe_dsa", {"index_head_dim": 8}, "index_head_dim must be an integer from 16"),
    ("glm_moe_dsa", {"index_topk": 0}, "index_topk must be an integer from 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def minimax_m3(**changes: Any) -> ModelSpec:
    """Spec of MiniMax-M3 with other values in its `text_config`."""
    text = json.loads((folder_of("minimax_m3") / "config.json").read_text())["text_config"] | changes
    return spec_of("minimax_m3", text_config={key: value for key, value in text.items() if value is not LEFT_OUT})


def choices(spec: ModelSpec) -> list[int | None]:
    """Layer whose choice of tokens each layer uses; None for all tokens."""
    attentions = [layer.attention for layer in spec.layers]
    return [n if found.indexer is not None else found.selection_layer for n, found in enumerate(attentions)]


def indexers(spec: ModelSpec) -> list[Indexer]:
    """Indexers of the layers that have one."""
    return [layer.attention.indexer for layer in spec.layers if layer.attention.indexer is not None]


def test_layers_share_choices() -> None:
    assert choices(spec_of("glm_moe_dsa")) == [0, 0, 2]

    def without_types(**changes: Any) -> list[int | None]:
        return choices(spec_of("glm_moe_dsa", indexer_types=LEFT_OUT, **changes))

    assert without_types() == [0, 1, 2]
    assert without_types(index_topk_pattern="FSS") == [0, 0, 0]
    assert without_types(index_topk_freq=2) == [0, 1, 1]
    assert without_types(index_topk_freq=2, index_skip_topk_offset=1) == [0, 0, 2]


def test_heads_choose_tokens_together() -> None:
    spec = spec_of("glm_moe_dsa")
    norm = LayerNorm(1e-6)
    assert indexers(spec) == [Indexer(heads=8, head_dim=24, blocks=16, k_norm=norm, rope=0)] * 2
    assert latents(spec).norm == RmsNorm(1e-6)
    fields = ("index_n_heads", "index_head_dim", "index_topk")
    default = indexers(spec_of("glm_moe_dsa", **dict.fromkeys(fields, LEFT_OUT)))[0]
    assert default == Indexer(heads=32, head_dim=128, blocks=2048, k_norm=norm, rope=0)
    assert sparse(spec_of("glm_moe_dsa", mlp_layer_types=LEFT_OUT)) == [False, True, True]
    assert sparse(spec_of("glm_moe_dsa", mlp_layer_types=LEFT_OUT, first_k_dense_replace=LEFT_OUT)) == [False] * 3


def test_each_head_chooses_blocks() -> None:
    norm = RmsNorm(1e-6, weight_offset=1.0)
    blocks = Indexer(2, 16, 3, block=16, local_blocks=1, choice="each_head", q_norm=norm, k_norm=norm, rope=0)
    spec = minimax_m3()
    assert (choices(spec), indexers(spec), sparse(spec)) == ([None, 1, 2], [blocks] * 2, [False, True, True])


def test_published_fields_of_block_choices() -> None:
    published = {
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 16,
        "sparse_block_size": 16,
        "sparse_topk_blocks": 3,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1],
    }
    fields = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks")
    gone = dict.fromkeys((*fields, "layer_types", "mlp_layer_types"), LEFT_OUT)
    spec = minimax_m3(**gone, sparse_attention_config=published, moe_layer_freq=[0, 1, 1], hidden_act="swigluoai")
    assert spec.layers == minimax_m3().layers
    assert choices(minimax_m3(**gone)) == [None] * 3
    assert sparse(minimax_m3(**gone)) == [True] * 3
    # The reference ignores rotary_dim, which published files have as well.
    assert [rope.rotary_dim for rope in minimax_m3(rope_parameters=LEFT_OUT).ropes] == [24]
    assert minimax_m3(rotary_dim=64) == minimax_m3()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 3}, "layer_types must be a list of 3 items, each one of full_attention"),
        ({"mlp_layer_types": LEFT_OUT, "moe_layer_freq": [1]}, "moe_layer_freq must be a list of 3 items, each 0 or 1"),
        ({"mlp_layer_types": LEFT_OUT, "moe_layer_freq": [2] * 3}, "moe_layer_freq must be a list of integers"),
        ({"index_block_size": 0}, "index_block_size must be an integer from 1"),
    ],
)
def test_minimax_m3_unsupported_values(changes: dict[str, Any], message: str) -> None:
    text = json.loads((folder_of("minimax_m3") / "config.json").read_text())["text_config"] | changes
    changed = {key: value for key, value in text.items() if value is not LEFT_OUT}
    with pytest.raises(ConfigError) as caught:
        spec_of("minimax_m3", text_config=changed)
    assert message in str(caught.value)
