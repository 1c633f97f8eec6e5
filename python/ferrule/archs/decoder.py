"""Builds the spec of a decoder from the switches in which families differ; defaults are Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

from ferrule.archs.config import MAX_SEPARATE_TENSORS, Config
from ferrule.archs.rope import context_length, read_rope
from ferrule.archs.spec import (
    Attention,
    Block,
    Dense,
    Embedding,
    Experts,
    Ffn,
    HeadNorm,
    HeadProjections,
    LatentProjections,
    Layer,
    LmHead,
    Mixer,
    ModelSpec,
    Norm,
    QueryGrowth,
    RmsNorm,
    Rope,
)
from ferrule.archs.tensors import Fused, tensors_named

MODULES = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    "attention.q": "model.layers.{layer}.self_attn.q_proj",
    "attention.k": "model.layers.{layer}.self_attn.k_proj",
    "attention.v": "model.layers.{layer}.self_attn.v_proj",
    "attention.output": "model.layers.{layer}.self_attn.o_proj",
    "attention.q_norm": "model.layers.{layer}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{layer}.self_attn.k_norm",
    "ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "ffn.gate": "model.layers.{layer}.mlp.gate_proj",
    "ffn.up": "model.layers.{layer}.mlp.up_proj",
    "ffn.down": "model.layers.{layer}.mlp.down_proj",
    "ffn.router": "model.layers.{layer}.mlp.gate",
    "ffn.experts.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    "ffn.experts.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    "ffn.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
"""Module names of each role in Llama's checkpoints, and of experts in Qwen's."""

LAYER_TYPES = ("full_attention", "sliding_attention")


Norms: TypeAlias = Literal["before", "after", "around", "sum"]
"""Position of a block's norms: before the block, after it, around it (both), or on the residual sum."""


def decoder(
    config: Config,
    *,
    norm: Norm | None = None,
    norms: Norms | Sequence[Norms] = "before",
    parallel: Literal["one_norm", "two_norms"] | None = None,
    windows: Sequence[int | None] | None = None,
    rotated: Sequence[bool] | bool = True,
    partial_rotary: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    rope_of: Callable[[str], Rope] | None = None,
    layer_ropes: Sequence[Rope | None] | None = None,
    projections: LatentProjections | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: HeadNorm | None = None,
    clip: float | None = None,
    scale: Sequence[float] | float | None = None,
    softcap: float | None = None,
    query_growth: QueryGrowth | None = None,
    output_norm: Norm | None = None,
    alibi_slopes: Sequence[float] | None = None,
    sinks: bool = False,
    attention_of: Callable[[int, Attention], Attention] | None = None,
    output_gate: Literal["elements", "heads"] | None = None,
    gate_bias: bool = False,
    mixers: Mapping[int, Mixer] | None = None,
    ffn: Ffn | Sequence[Ffn | None] | None = None,
    mlp_bias: bool = False,
    residual_scale: float = 1.0,
    residual_after_norm: bool = False,
    embedding: Embedding | None = None,
    final_norm: bool = True,
    lm_head: LmHead | None = None,
    tied: bool = False,
    causal: bool = True,
    modules: Mapping[str, str | Fused] | None = None,
    alternatives: Mapping[str, str | Fused] | None = None,
) -> ModelSpec:
    """Returns a spec from the keys that most families share and the switches in which they differ.

    - `norm`: the norm of all blocks; RMSNorm with `rms_norm_eps` by default.
    - `norms`: position of the norms, in all layers or in each.
    - `parallel`: attention and feed-forward network read the same input, with one shared norm or one norm each.
    - `windows`: sliding window of each layer in tokens, None for full attention.
    - `rotated`: whether each layer applies the rotary embedding.
    - `partial_rotary`: default of `partial_rotary_factor`, for families that have it.
    - `rotary_dim`: rotated elements of a head, for families that count them.
    - `rope_of`: reads the rotary embedding of a layer type, for families with other keys.
    - `layer_ropes`: rotary embedding of each layer, None for no rotation; replaces the arguments above.
    - `scale`: factor on attention scores, for all layers or for each.
    - `attention_of`: changes the attention of a layer, given its index, for layers with other heads or switches.
    - `mixers`: mixers in place of attention, by layer; blocks have the names of their types, or `ffn`.
    - `ffn`: feed-forward network of all layers or of each, None for none; gated with `intermediate_size` by default.
    - `tied`: default of `tie_word_embeddings`.
    - `causal`: whether attention is causal; without it, there is no lm_head.
    - `modules`: entries that are added to MODULES or replace entries there.
    - `alternatives`: modules of roles that other checkpoints store under another name.

    The other arguments are fields of the spec.
    """
    layers = config.layers
    norm = RmsNorm(eps=config.number("rms_norm_eps", default=1e-6)) if norm is None else norm
    if ffn is None:
        ffn = Dense(config.integer("intermediate_size"), config.activation, bias=mlp_bias)
    ffns = [ffn] * layers if not isinstance(ffn, Sequence) else ffn
    heads_apart = layers * config.heads if qk_norm is not None and qk_norm.over == "each_head" else 0
    check_separate_tensors(
        config,
        sum(each.experts for each in (*ffns, *(mixers or {}).values()) if isinstance(each, Experts)) + heads_apart,
    )
    windows = [None] * layers if windows is None else windows
    rotated = [rotated] * layers if isinstance(rotated, bool) else rotated

    # A file may give each layer type its own rotary embedding.
    width = config.head_dim if projections is None else projections.rope_dim
    types = [LAYER_TYPES[window is not None] for window in windows]
    needed = dict.fromkeys(kind for kind, rotate in zip(types, rotated, strict=True) if rotate)
    if rope_of is None:
        options = {"partial": partial_rotary, "rotary_dim": rotary_dim, "interleaved": interleaved}
        rope_of = partial(read_rope, config, width, **options)
    if layer_ropes is None:
        ropes = {kind: rope_of(kind) for kind in needed}
        layer_ropes = [ropes[kind] if rotate else None for kind, rotate in zip(types, rotated, strict=True)]
    distinct = list(dict.fromkeys(rope for rope in layer_ropes if rope is not None))

    key_dim = width if projections is None else projections.nope_dim + projections.rope_dim
    scales = scale if isinstance(scale, Sequence) else [key_dim**-0.5 if scale is None else scale] * layers
    attention = Attention(
        heads=config.heads,
        scale=scales[0],
        projections=projections
        or HeadProjections(config.kv_heads, key_dim=width, value_dim=width, bias=qkv_bias, qk_norm=qk_norm, clip=clip),
        output_bias=output_bias,
        softcap=softcap,
        query_growth=query_growth,
        output_norm=output_norm,
        alibi_slopes=None if alibi_slopes is None else tuple(alibi_slopes),
        sinks=sinks,
        output_gate=output_gate,
        gate_bias=gate_bias,
    )
    if lm_head is None and causal:
        lm_head = LmHead(tied=config.flag("tie_word_embeddings", default=tied))
    mixers = mixers or {}
    attention_of = attention_of or (lambda _, attention: attention)
    positions = [norms] * layers if isinstance(norms, str) else norms
    blocks = [
        Block(
            name="attention",
            mixer=attention,
            norm=norm if position in ("before", "around") else None,
            post_norm=norm if position in ("after", "around") else None,
            sum_norm=norm if position == "sum" else None,
            residual_scale=residual_scale,
            residual_after_norm=residual_after_norm,
        )
        for position in positions
    ]
    spec = ModelSpec(
        architecture=config.text("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position_embeddings=min(
            (context_length(config, rope) for rope in distinct), default=config.integer("max_position_embeddings")
        ),
        embedding=Embedding() if embedding is None else embedding,
        ropes=distinct,
        layers=[
            Layer(
                tuple(
                    block
                    for block in (
                        replace(block, name=_block_name(mixers[index]), mixer=mixers[index])
                        if index in mixers
                        else replace(
                            block,
                            mixer=attention_of(
                                index,
                                replace(
                                    attention,
                                    scale=layer_scale,
                                    window=window,
                                    rope=None if rope is None else distinct.index(rope),
                                ),
                            ),
                        ),
                        layer_ffn
                        and replace(
                            block,
                            name="ffn",
                            mixer=layer_ffn,
                            norm=None if parallel == "one_norm" else block.norm,
                            parallel=parallel is not None,
                        ),
                    )
                    if block is not None
                )
            )
            for index, (block, window, rope, layer_scale, layer_ffn) in enumerate(
                zip(blocks, windows, layer_ropes, scales, ffns, strict=True)
            )
        ],
        final_norm=norm if final_norm else None,
        lm_head=lm_head,
        causal=causal,
    )
    return replace(spec, tensors=tensors_named(spec, {**MODULES, **(modules or {})}, alternatives=alternatives))


def _block_name(mixer: Mixer) -> str:
    """Name of the block of a mixer that takes the place of attention."""
    return "ffn" if isinstance(mixer, Dense | Experts) else mixer.type


def check_separate_tensors(config: Config, count: int) -> None:
    """Refuses models with so many separate expert or head tensors that listing their names takes long."""
    if count > MAX_SEPARATE_TENSORS:
        limit = f"small enough for at most {MAX_SEPARATE_TENSORS} experts and heads in separate tensors (not {count})"
        raise config.error("num_hidden_layers", limit)


def layer_windows(config: Config, *, sliding: Callable[[int], bool], window: int | None) -> list[int | None]:
    """Returns the window of each layer, from `layer_types` or, in old files, from `sliding`."""
    types = config.layer_kinds("layer_types", *LAYER_TYPES)
    types = types or [LAYER_TYPES[sliding(index)] for index in range(config.layers)]
    if window is None and "sliding_attention" in types:
        raise config.error("sliding_window", "an integer, and enabled, because the model has sliding layers")
    return [window if kind == "sliding_attention" else None for kind in types]
