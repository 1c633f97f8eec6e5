"""Qwen4-Exp: how config.json is read, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, folder_of, last_experts, spec_of
from ferrule import LLM, ModelFileError, UnsupportedModelError
from ferrule.archs.spec import DeltaNet, Gated, Indexer, Joined, ModelSpec, NgramEmbedding, RmsNorm, Table
from ferrule.archs.tensors import roles
from quantized_files import Stored, read, write

CASE = "qwen4_exp"
NORM = RmsNorm(1e-6, weight_offset=1.0)
LAYERS = 100
MANY_LAYERS = {
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention"] * LAYERS,
    "ple_layer_ids": list(range(1, LAYERS + 1)),
    "split_ngram_parts": 4096,
}
"""A model with embeddings of n-grams in many layers."""


def ngrams(spec: ModelSpec) -> list[list[NgramEmbedding]]:
    """Embeddings of n-grams of each layer."""
    return [layer.mixers(NgramEmbedding) for layer in spec.layers]


def integers(tensor: Stored) -> tuple[int, ...]:
    """Values of an I64 tensor."""
    dtype, [count], raw = tensor
    assert dtype == "I64"
    return struct.unpack(f"<{count}q", raw)


def test_blocks_read_a_gated_mean_that_their_output_replaces() -> None:
    spec = spec_of(CASE)
    assert spec.streams is not None
    assert (spec.streams.count, spec.streams.ends, spec.final_norm) == (4, Gated(NORM, 8), None)
    spans = [[(span.blocks, type(span.mix)) for span in layer.spans] for layer in spec.layers]
    assert spans == [[(1, Joined), (1, Gated), (1, Gated)]] * 2 + [[(1, Gated), (1, Gated)]]
    blocks = [block for layer in spec.layers for block in layer.blocks]
    assert all(block.norm is None for block in blocks)
    assert [block.stream_scale for block in blocks] == [1, 0, 0, 1, 0, 0, 0, 0]
    assert set(roles(spec)) == set(spec.tensors)
    assert "final_norm.weight" not in spec.tensors


def test_hashes_are_those_of_the_checkpoint() -> None:
    first, second = (found for [found] in ngrams(spec_of(CASE))[:2])
    for layer, ngram in enumerate([first, second]):
        at = f"model.layers.{layer}.ple.ple_embedding"
        names = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        tensors = read(folder_of(CASE))
        stored = [integers(tensors[f"{at}.{name}"]) for name in names]
        offsets = (0, *accumulate(ngram.hash_rows[:-1]))
        assert [ngram.multipliers, ngram.hash_rows, offsets] == stored
    assert (first.columns, first.dilation, first.taps, first.end) == (2, 3, 4, 2)
    assert (first.first_table, second.first_table) == (0, 2)


@pytest.mark.native
def test_stored_constants_of_hashes_are_compared(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder_of(CASE), model)
    (model / "model.safetensors").chmod(0o644)
    tensors = read(model)
    at = "model.layers.1.ple.ple_embedding"
    for name, index in (("layer_multipliers", 0), ("ngram_heads_vocab_sizes", 5), ("ngram_heads_offsets", 7)):
        constants = integers(tensors[f"{at}.{name}"])
        other = [value + (place == index) for place, value in enumerate(constants)]
        write(model, tensors | {f"{at}.{name}": ("I64", (len(other),), struct.pack(f"<{len(other)}q", *other))})
        message = f'tensor "{at}.{name}" must hold {constants[index]} at index {index} (layers.1.ngram.'
        with pytest.raises(ModelFileError, match=f"{re.escape(message)}.*got {constants[index] + 1}"):
            LLM(model, quantization="f32")
    write(model, {name: tensor for name, tensor in tensors.items() if tensor[0] != "I64"})
    with LLM(model, quantization="f32") as llm:
        assert llm.info()["weight_bytes"] > 0


def test_tables_are_parts_of_one_matrix() -> None:
    spec = spec_of(CASE)
    assert spec.tables == [Table(rows, 2, hashed=True) for rows in (444, 444, 620, 620)]
    at = "model.layers.1.ple.ple_embedding.ngram_embedding"
    assert spec.tensors["tables.3.weight"].names == (f"{at}.shard_1.weight",)
    padded = spec_of(CASE, split_ngram_parts=3, ple_layer_ids=[1], make_ngram_vocab_size_divisible_by=100)
    assert [table.rows for table in padded.tables] == [300, 300, 300]
    uneven = spec_of(CASE, split_ngram_parts=5, ple_layer_ids=[1])
    assert [table.rows for table in uneven.tables] == [178, 178, 178, 178, 176]
    assert spec_of(CASE, ple_layer_ids=LEFT_OUT, eos_token_id=None).tables == []


def test_constants_of_hashes_in_gguf_files() -> None:
    """Files have the constants themselves; the numbers of rows are those of Qwen3.8 Flash Next."""
    rows, table = [20_000_003 + index for index in range(8)], 320_001_536
    constants = {"ngram_multipliers": [3, 5, 7], "ngram_hash_rows": rows}
    one_table = {"ple_layer_ids": [1], "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": table}
    spec = spec_of(CASE, **constants, **one_table)
    [ngram] = ngrams(spec)[0]
    assert (ngram.multipliers, list(ngram.hash_rows)) == ((3, 5, 7), rows)
    assert spec.tables == [Table(table, 2, hashed=True)]


def test_the_first_of_several_ends_separates_texts() -> None:
    [first] = ngrams(spec_of(CASE, eos_token_id=[7, 2]))[0]
    assert first.end == 7


def test_indexer_scores_the_means_of_blocks() -> None:
    spec = spec_of(CASE)
    indexer = spec.layers[2].attention.indexer
    assert indexer == Indexer(
        2, 16, blocks=8, block=4, keys="block_means", choice="sum", q_norm=NORM, k_norm=NORM, rope=0
    )
    fields = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    full = spec_of(CASE, **dict.fromkeys(fields, LEFT_OUT))
    assert full.layers[2].attention.indexer is None
    assert set(roles(full)) == set(full.tensors)


def test_names_of_layers_with_attention() -> None:
    expected = spec_of(CASE).layers
    for name in ("full_attention", "hybrid_indexed", "deepseek_sparse_attention"):
        assert spec_of(CASE, layer_types=["linear_attention", "linear_attention", name]).layers == expected
    assert spec_of(CASE, layer_types=LEFT_OUT, full_attention_interval=3).layers == expected


def test_text_model_of_a_multimodal_checkpoint() -> None:
    text = json.loads((folder_of(CASE) / "config.json").read_text())
    names = ["Qwen4ExpForConditionalGeneration"]
    spec = spec_of(CASE, architectures=names, model_type="qwen4_exp", text_config=text)
    assert (spec.layers, spec.tensors) == (spec_of(CASE).layers, spec_of(CASE).tensors)
    assert ("model.", "model.language_model.") in spec.prefixes


def test_gate_and_router() -> None:
    def gate(**changes: Any) -> str:
        [delta_net] = spec_of(CASE, **changes).layers[0].mixers(DeltaNet)
        return delta_net.gate

    assert (gate(), gate(output_gate_type="sigmoid")) == ("silu", "sigmoid")
    with pytest.raises(UnsupportedModelError, match="output_gate_type must be silu or sigmoid"):
        gate(output_gate_type="relu")
    assert not last_experts(spec_of(CASE, norm_topk_prob=False)).router.normalize


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hc_count": 1}, "hc_count must be an integer from 2 to 16, got 1"),
        ({"hc_lowrank": 0}, "hc_lowrank must be an integer from 1"),
        ({"layer_types": ["conv"] * 3}, "layer_types must be a list of 3 items, each one of linear_attention"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids must be a list of integers from 1 to 3"),
        ({"ngram_size": 1}, "ngram_size must be an integer from 2 to 16, got 1"),
        ({"heads_per_ngram": 300}, "heads_per_ngram must be an integer from 1 to 256, got 300"),
        ({"ple_embed_dim": 12}, "ple_embed_dim must be a multiple of (ngram_size - 1) * heads_per_ngram (8), got 12"),
        ({"eos_token_id": None}, "eos_token_id must be a token id, because n-grams do not cross"),
        ({"eos_token_id": 320}, "eos_token_id must be a token id from 0 to 319"),
        (
            MANY_LAYERS | {"ngram_size": 16},
            "ple_layer_ids must be so short that (ngram_size - 1) * layers (1500) is at",
        ),
        (
            MANY_LAYERS | {"heads_per_ngram": 1},
            "split_ngram_parts must be at most 1310 for the 100 layers of ple_layer_ids",
        ),
        (MANY_LAYERS | {"heads_per_ngram": None}, "heads_per_ngram must be an integer from 1 to 5, got 8"),
        ({"ple_layer_ids": [1], "ngram_multipliers": [3]}, "ngram_multipliers must be a list of 3 integers, got [3]"),
        (
            {"ple_layer_ids": [1, 2], "ngram_multipliers": [3, 5, 7], "ngram_hash_rows": [97] * 8},
            "ple_layer_ids must be one layer if ngram_multipliers is given, got [1, 2]",
        ),
        ({"split_ngram_parts": 0}, "split_ngram_parts must be an integer from 1"),
        ({"make_ngram_vocab_size_divisible_by": 0}, "make_ngram_vocab_size_divisible_by must be an integer from 1"),
        ({"ple_conv_kernel_size": 65}, "ple_conv_kernel_size must be an integer from 1 to 64, got 65"),
        ({"indexer_budget": 30}, "indexer_budget must be a multiple of indexer_compress_ratio (4), got 30"),
        ({"indexer_n_heads": None}, "indexer_n_heads must be an integer from 1"),
        ({"indexer_head_dim": 4}, "indexer_head_dim must be an integer from 8"),
    ],
)
def test_unsupported_values(changes: dict[str, Any], message: str) -> None:
    assert_refused(CASE, changes, message)


def test_the_indexer_has_one_key() -> None:
    with pytest.raises(UnsupportedModelError, match="indexer_kv_heads must be 1, got 2"):
        spec_of(CASE, indexer_kv_heads=2)
