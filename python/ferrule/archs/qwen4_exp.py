"""Qwen4-Exp (Qwen Team 2026): Qwen3.5's layers on several residual streams, and embeddings of hashed n-grams.

Attention reads the blocks of tokens that an indexer chooses by the mean of their keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Literal

from ferrule.archs.config import MAX_SEPARATE_TENSORS, MAX_SIZE, MAX_TABLE_ROWS, Config
from ferrule.archs.qwen3_5 import delta_net_modules
from ferrule.archs.qwen3_next import gated_decoder, read_delta_net, shared_experts
from ferrule.archs.spec import (
    Attention,
    Block,
    Gated,
    Indexer,
    Joined,
    Layer,
    ModelSpec,
    NgramEmbedding,
    RmsNorm,
    Span,
    Streams,
    Table,
)
from ferrule.archs.tensors import Fused, fused, tensors_named

_LAYER = "model.layers.{layer}"
_NGRAM = f"{_LAYER}.ple"

_MODULES = {
    **{
        f"{span}_streams.{role}": f"{_LAYER}.{module}_hyper_connection.{name}"
        for span, module in (("attention", "attn"), ("ffn", "mlp"))
        for role, name in (
            ("norm", "hc_norm"),
            ("down", "input_mix_weight_down"),
            ("up", "input_mix_weight_up"),
            ("inject", "block_inject_weight"),
        )
    },
    "streams.end.norm": "model.hyper_connection_mixer.hc_norm",
    "streams.end.down": "model.hyper_connection_mixer.input_mix_weight_down",
    "streams.end.up": "model.hyper_connection_mixer.input_mix_weight_up",
    "ngram.key": f"{_NGRAM}.key_proj",
    "ngram.value": f"{_NGRAM}.value_proj",
    "ngram.key_norm": f"{_NGRAM}.norm_key",
    "ngram.query_norm": f"{_NGRAM}.norm_query",
    "ngram.kernel_norm": f"{_NGRAM}.norm_conv",
    "ngram.kernel": f"{_NGRAM}.conv1d",
    **{
        f"ngram.{role}": f"{_NGRAM}.ple_embedding.{name}"
        for role, name in (
            ("multipliers", "layer_multipliers"),
            ("hash_rows", "ngram_heads_vocab_sizes"),
            ("first_rows", "ngram_heads_offsets"),
        )
    },
    "attention.indexer.q_norm": f"{_LAYER}.self_attn.indexer.q_layernorm",
    "attention.indexer.k_norm": f"{_LAYER}.self_attn.indexer.k_layernorm",
}

ATTENTION_TYPES = (
    "full_attention",
    "indexed_attention",
    "hybrid_indexed",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
)
"""Names of layers with attention in `layer_types`; whether they have an indexer follows from its fields."""

MAX_STREAMS = 16
"""Most residual streams; the native module has the same limit."""
MAX_NGRAM = 16
"""Longest n-gram; the native module has the same limit."""
MAX_HASHES = 1024
"""Most hashes of all layers together, each of which takes a prime number."""
MAX_TAPS = 64
"""Most taps of a convolution; the native module has the same limit."""
MAX_PARTS = 4096
"""Most parts of a table, which are separate tensors."""


def qwen4_exp(config: Config) -> ModelSpec:
    """Every fourth layer has attention by default."""
    config = config.with_defaults(
        max_position_embeddings=32_768,
        moe_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        shared_expert_intermediate_size=512,
        heads_per_ngram=8,
        split_ngram_parts=512,
    ).with_absent(num_key_value_heads=2)
    delta_net = replace(read_delta_net(config), gate=_gate(config))
    experts = shared_experts(config, normalize=config.flag("norm_topk_prob", default=True))
    spec = gated_decoder(
        _usual_types(config),
        delta_net,
        experts,
        delta_net_modules(delta_net),
        interval=config.integer("full_attention_interval", default=4),
        partial_rotary=1.0,
    )
    norm = RmsNorm(config.number("rms_norm_eps", default=1e-6), weight_offset=1.0)
    streams = config.integer("hc_count", default=4, low=2, high=MAX_STREAMS)
    gated = Gated(norm, config.integer("hc_lowrank", default=320))
    indexer = _indexer(config, spec, norm)
    ngrams = _ngrams(config, spec, streams, norm)
    layers = [_layer(layer, ngrams.get(index), gated, indexer) for index, layer in enumerate(spec.layers)]
    tables = [table for ngram in ngrams.values() for table in _tables(config, ngram)]
    shards = {
        f"tables.{ngram.first_table + n}": f"model.layers.{index}.ple.ple_embedding.ngram_embedding.shard_{n}"
        for index, ngram in ngrams.items()
        for n in range(ngram.tables)
    }
    modules = {**_MODULES, **shards, **_indexer_modules(indexer)}
    spec = replace(spec, layers=layers, tables=tables, streams=Streams(streams, gated), final_norm=None)
    return replace(spec, tensors=tensors_named(spec, modules, spec.tensors))


def _gate(config: Config) -> Literal["silu", "sigmoid"]:
    """Activation of the gate of delta nets."""
    field = "output_gate_type" if "output_gate_type" in config else "hidden_act"
    name = config.text(field, default="silu")
    if name not in ("silu", "sigmoid"):
        raise config.unsupported(field, "silu or sigmoid")
    return name


def _usual_types(config: Config) -> Config:
    """Returns the configuration with Qwen3.5's names in `layer_types`."""
    types = config.layer_kinds("layer_types", "linear_attention", *ATTENTION_TYPES)
    usual = ["full_attention" if kind in ATTENTION_TYPES else kind for kind in types]
    return config.with_values(layer_types=usual) if types else config


def _indexer(config: Config, spec: ModelSpec, norm: RmsNorm) -> Indexer | None:
    """Returns the indexer of layers with attention, if the configuration has one."""
    fields = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    if not any(field in config for field in fields):
        return None
    config.require(indexer_kv_heads=1)
    block = config.integer("indexer_compress_ratio")
    budget = config.integer("indexer_budget")
    if budget % block:
        raise config.error("indexer_budget", f"a multiple of indexer_compress_ratio ({block})")
    rotary_dim = max((rope.rotary_dim for rope in spec.ropes), default=1)
    return Indexer(
        heads=config.integer("indexer_n_heads"),
        head_dim=config.integer("indexer_head_dim", low=rotary_dim),
        blocks=budget // block,
        block=block,
        keys="block_means",
        choice="sum",
        q_norm=norm,
        k_norm=norm,
        rope=0,
    )


def _indexer_modules(indexer: Indexer | None) -> dict[str, Fused]:
    if indexer is None:
        return {}
    rows = {"attention.indexer.q": indexer.heads * indexer.head_dim, "attention.indexer.k": indexer.head_dim}
    return fused(f"{_LAYER}.self_attn.indexer.index_qk_proj", rows)


def _ngrams(config: Config, spec: ModelSpec, streams: int, norm: RmsNorm) -> dict[int, NgramEmbedding]:
    """Returns the embeddings of n-grams by layer; `ple_layer_ids` counts layers from 1.

    Hashes have prime numbers of rows, in ascending order over all layers.
    """
    layers = sorted({layer - 1 for layer in config.integers("ple_layer_ids", low=1, high=config.layers)})
    if not layers:
        return {}
    length = config.integer("ngram_size", default=3, low=2, high=MAX_NGRAM)
    most = MAX_HASHES // ((length - 1) * len(layers))
    if most == 0:
        limit = f"so short that (ngram_size - 1) * layers ({(length - 1) * len(layers)}) is at most {MAX_HASHES}"
        raise config.error("ple_layer_ids", limit)
    hashes = (length - 1) * config.integer("heads_per_ngram", high=most)
    width = config.integer("ple_embed_dim", default=spec.hidden_size)
    if width % hashes:
        raise config.error("ple_embed_dim", f"a multiple of (ngram_size - 1) * heads_per_ngram ({hashes})")
    ends = config.token_ids("eos_token_id", spec.vocab_size)
    if not ends:
        raise config.error("eos_token_id", "a token id, because n-grams do not cross the ends of texts")
    seed = config.integer("seed", default=1234, low=0)
    primes = _primes(config.integer("ngram_vocab_size_base", default=20_000_000))
    given = _given_constants(config, length, hashes)
    if given and len(layers) > 1:
        raise config.unsupported("ple_layer_ids", "one layer if ngram_multipliers is given")
    parts = config.integer("split_ngram_parts", high=MAX_PARTS)
    if parts * len(layers) > MAX_SEPARATE_TENSORS:
        limit = f"at most {MAX_SEPARATE_TENSORS // len(layers)} for the {len(layers)} layers of ple_layer_ids"
        raise config.error("split_ngram_parts", limit)
    ngrams: dict[int, NgramEmbedding] = {}
    for number, layer in enumerate(layers):
        ngram = NgramEmbedding(
            width=spec.hidden_size,
            streams=streams,
            first_table=sum(ngram.tables for ngram in ngrams.values()),
            tables=0,
            columns=width // hashes,
            multipliers=given[0] if given else _multipliers(seed + 10_007 * number, length, spec.vocab_size),
            hash_rows=given[1] if given else tuple(islice(primes, hashes)),
            end=ends[0],
            norm=norm,
            taps=config.integer("ple_conv_kernel_size", default=4, high=MAX_TAPS),
            dilation=length,
        )
        ngrams[layer] = replace(ngram, tables=len(_tables(config, ngram)))
    return ngrams


def _given_constants(config: Config, length: int, hashes: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the multipliers and the rows of each hash that GGUF files have in place of what they follow from."""
    multipliers = config.integers("ngram_multipliers", low=-(2**63), high=2**63 - 1)
    rows = config.integers("ngram_hash_rows", low=1, high=MAX_SIZE)
    if not multipliers and not rows:
        return None
    for field, found, wanted in (("ngram_multipliers", multipliers, length), ("ngram_hash_rows", rows, hashes)):
        if len(found) != wanted:
            raise config.error(field, f"a list of {wanted} integers")
    return tuple(multipliers), tuple(rows)


def _tables(config: Config, ngram: NgramEmbedding) -> list[Table]:
    """Returns the tables of an embedding: parts of one matrix, all but the last of the same size."""
    multiple = config.integer("make_ngram_vocab_size_divisible_by", default=128, high=MAX_TABLE_ROWS)
    rows = -(-sum(ngram.hash_rows) // multiple) * multiple
    of_each = -(-rows // config.integer("split_ngram_parts", high=MAX_PARTS))
    return [Table(min(of_each, rows - first), ngram.columns, hashed=True) for first in range(0, rows, of_each)]


def _primes(first: int) -> Iterator[int]:
    """Yields the prime numbers from `first` on."""
    for number in count(max(first, 2)):
        if number == 2 or (number % 2 and all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))):
            yield number


def _multipliers(seed: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """Returns the multipliers of an n-gram's tokens: odd numbers by SplitMix64 (Steele et al. 2014).

    They are so small that the product with a token does not wrap around.
    """
    bound = max(1, (2**63 - 1) // vocab_size // 2)
    return tuple(2 * (_mixed(seed + _GAMMA * (token + 1)) % bound) + 1 for token in range(length))


_GAMMA = 0x9E37_79B9_7F4A_7C15
_WORD = 2**64 - 1


def _mixed(value: int) -> int:
    """Returns the output of SplitMix64 for a state."""
    value = (value + _GAMMA) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _WORD
    return value ^ (value >> 31)


def _layer(layer: Layer, ngram: NgramEmbedding | None, gated: Gated, indexer: Indexer | None) -> Layer:
    """Returns a layer whose blocks read a gated mean of all residual streams and whose outputs are added to each."""
    blocks: list[Block] = []
    for block in layer.blocks:
        mixer = block.mixer
        if isinstance(mixer, Attention):
            mixer = replace(mixer, indexer=indexer)
        blocks.append(replace(block, mixer=mixer, norm=None, stream_scale=0.0))
    spans = (Span("attention_streams", 1, gated), Span("ffn_streams", 1, gated))
    if ngram is None:
        return Layer(tuple(blocks), spans)
    return Layer((Block("ngram", ngram), *blocks), (Span("ngram_streams", 1, Joined()), *spans))
