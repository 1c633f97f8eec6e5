"""Descriptions of layers in words, for `ferrule info`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ferrule.archs.spec import (
    Alternating,
    Attention,
    Clamp,
    CompressedAttention,
    DeltaNet,
    Dense,
    Experts,
    Gated,
    HeadNorm,
    HeadProjections,
    Joined,
    LatentProjections,
    Laurel,
    Layer,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    NgramEmbedding,
    Norm,
    NoScaling,
    PerLayerEmbedding,
    Projection,
    RecurrentMixer,
    RgLru,
    Rope,
    Router,
    RwkvChannelMix,
    RwkvTimeMix,
    ShortConvolution,
    Side,
    Sinkhorn,
    Span,
    Xielu,
)

OVER = {"head": "per head", "each_head": "per head, with separate weights", "heads": "over all heads"}
"""Descriptions of the values that a norm of queries and keys spans, by `HeadNorm.over`."""


def mixer_words(mixer: Mixer, ropes: Sequence[Rope]) -> tuple[str, str]:
    """Returns the kind of a mixer and its description, such as `("network", "gated silu, 8,192 wide")`."""
    words: Iterable[str]
    match mixer:
        case Attention():
            kind, words = "attention", _attention(mixer, ropes)
        case CompressedAttention():
            kind, words = "attention", _compressed_attention(mixer, ropes)
        case Dense():
            kind, words = "network", [_dense(mixer)]
        case Experts():
            kind, words = "experts", _moe(mixer)
        case Laurel():
            kind, words = "laurel", [f"augmented residual of rank {mixer.rank:,}"]
        case PerLayerEmbedding():
            kind, words = "per-layer", [f"embedding of the token, {mixer.width:,} wide, gated {mixer.activation}"]
        case Projection():
            kind, words = "projection", ["one matrix", *(["with biases"] if mixer.bias else [])]
        case _:
            kind, words = _recurrent(mixer)
    return kind, "; ".join(words)


def frame_words(layer: Layer) -> str:
    """Describes the norms and the residual connections: `rms norm before each block`."""
    return "; ".join(_frame(layer))


def count_words(number: int, noun: str) -> str:
    """Formats a count with its noun: `1 head`, `4,096 heads`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _attention(attention: Attention, ropes: Sequence[Rope]) -> Iterator[str]:
    match attention.projections:
        case HeadProjections() as heads:
            width = f"{heads.key_dim:,}"
            if heads.value_dim != heads.key_dim:
                width += f" (values {heads.value_dim:,})"
            shared = "" if heads.kv_heads == attention.heads else f", {count_words(heads.kv_heads, 'key-value head')}"
            yield f"{count_words(attention.heads, 'head')} of {width}{shared}"
            usual = heads.key_dim**-0.5
            if heads.qk_norm is not None:
                yield _head_norm(heads.qk_norm)
            if heads.clip is not None:
                yield f"queries, keys and values clipped at {heads.clip:g}"
        case LatentProjections() as latent:
            queries = "" if latent.query_rank is None else f", queries of rank {latent.query_rank:,}"
            yield f"{count_words(attention.heads, 'head')}, latent attention of rank {latent.kv_rank:,}{queries}"
            rotated = "" if attention.rope is None else " with RoPE"
            yield f"keys of {latent.nope_dim:,} + {latent.rope_dim:,}{rotated}, values of {latent.value_dim:,}"
            usual = (latent.nope_dim + latent.rope_dim) ** -0.5
    if attention.kv_layer is not None:
        yield f"keys and values of layer {attention.kv_layer}"
    yield "no RoPE" if attention.rope is None else _rope(ropes[attention.rope], attention)
    yield from _mask(attention)
    if attention.output_norm is not None:
        yield f"{_norm(attention.output_norm)} before the output projection"
    if attention.output_gate is not None:
        biased = ", with biases" if attention.gate_bias else ""
        yield f"gated output (per {attention.output_gate.removesuffix('s')}{biased})"
    if attention.scale != usual:
        yield f"scores scaled by {attention.scale:.4g}"
    if attention.softcap is not None:
        yield f"score softcap {attention.softcap:g}"
    biases = [
        name
        for name, present in (("q, k, v", attention.projections.bias), ("output", attention.output_bias))
        if present
    ]
    if biases:
        yield f"biases on {' and '.join(biases)}"


def _compressed_attention(attention: CompressedAttention, ropes: Sequence[Rope]) -> Iterator[str]:
    yield f"{count_words(attention.heads, 'head')} of {attention.head_dim:,}, keys are values"
    yield f"queries of rank {attention.query_rank:,}"
    yield _rotation(ropes[attention.rope], attention.head_dim)
    yield f"window of {attention.window:,}"
    if attention.compression is not None:
        block, indexer = attention.compression.block, attention.compression.indexer
        chosen = "all" if indexer is None else f"{indexer.entries:,}"
        overlap = ", overlapping" if attention.compression.overlap else ""
        yield f"{chosen} entries of {count_words(block, 'token')}{overlap}"
    yield "sinks"
    yield f"output of {count_words(attention.output_groups, 'group')} of rank {attention.output_rank:,}"


def _recurrent(mixer: RecurrentMixer) -> tuple[str, Iterable[str]]:
    words: Iterable[str]
    match mixer:
        case ShortConvolution():
            biases = ", with biases" if mixer.bias else ""
            kind, words = "convolution", [f"gated, {mixer.taps} tokens, {mixer.channels:,} channels{biases}"]
        case DeltaNet():
            kind, words = "delta net", _delta_net(mixer)
        case LightningAttention():
            heads = f"{count_words(len(mixer.decays), 'head')} of {mixer.head_dim:,}"
            kind, words = "lightning attention", [heads, f"{_norm(mixer.norm)} of the output"]
        case Mamba():
            kind, words = "Mamba", _mamba(mixer)
        case Mamba2():
            kind, words = "Mamba 2", _mamba2(mixer)
        case NgramEmbedding():
            kind, words = "n-grams", _ngram(mixer)
        case RgLru():
            heads = f"{mixer.channels:,} channels in {count_words(mixer.heads, 'head')}"
            kind, words = "RG-LRU", [heads, f"convolution over {mixer.taps} tokens"]
        case RwkvTimeMix():
            kind, words = "time mixing", [f"{mixer.channels:,} channels"]
        case RwkvChannelMix():
            kind, words = "channel mixing", [f"gated relu2, {mixer.intermediate_size:,} wide"]
    return kind, words


def _delta_net(delta_net: DeltaNet) -> Iterator[str]:
    heads = count_words(delta_net.value_heads, "head")
    shared = "" if delta_net.key_heads == delta_net.value_heads else f", {count_words(delta_net.key_heads, 'key head')}"
    yield f"{heads} of {delta_net.key_dim:,} x {delta_net.value_dim:,}{shared}"
    yield _convolution(delta_net)
    bounded = "" if delta_net.decay.lower_bound is None else ", bounded"
    yield f"decay per {'key element' if delta_net.decay.by_key else 'head'}{bounded}"
    if delta_net.update_scale != 1:
        yield f"updates scaled by {delta_net.update_scale:g}"
    yield f"{delta_net.gate} gate"


def _mask(attention: Attention) -> Iterator[str]:
    if attention.window is not None:
        yield f"window of {attention.window:,}"
    if attention.chunk is not None:
        yield f"chunks of {attention.chunk:,}"
    if attention.query_growth is not None:
        yield f"queries grow every {count_words(attention.query_growth.length, 'position')}"
    if attention.alibi_slopes is not None:
        yield "ALiBi"
    if attention.sinks:
        yield "sinks"


def _mamba(mamba: Mamba) -> Iterator[str]:
    yield f"{count_words(mamba.channels, 'channel')} with a state of {mamba.state_size:,}"
    yield f"steps of rank {mamba.step_rank:,}"
    yield f"convolution over {mamba.taps} tokens"
    if mamba.norm is not None:
        yield f"{_norm(mamba.norm)} of steps, keys and queries"
    yield from _biases(mamba, output=mamba.bias)


def _mamba2(mamba2: Mamba2) -> Iterator[str]:
    heads = count_words(mamba2.heads, "head")
    shared = "" if mamba2.groups == mamba2.heads else f", {count_words(mamba2.groups, 'group')}"
    yield f"{heads} of {mamba2.head_dim:,}{shared}"
    yield f"state of {mamba2.state_size:,} per element"
    yield _convolution(mamba2)
    if mamba2.norm is not None:
        yield f"output normed {'before' if mamba2.norm_before_gate else 'after'} its gate"
    yield from _biases(mamba2, output=mamba2.output_bias)


def _ngram(ngram: NgramEmbedding) -> Iterator[str]:
    rows = f"{count_words(len(ngram.hash_rows), 'row')} of {ngram.columns:,}"
    yield f"{rows}, by hashes of up to {len(ngram.multipliers)} tokens"
    yield f"convolution over {ngram.taps} tokens, {ngram.dilation} apart"


def _convolution(mixer: DeltaNet | Mamba2) -> str:
    activation = "" if mixer.activation == "silu" else f", {mixer.activation}"
    return f"convolution over {mixer.taps} tokens{activation}"


def _biases(mixer: Mamba | Mamba2, *, output: bool) -> Iterator[str]:
    projections = {"projections": mixer.bias and output, "inputs": mixer.bias and not output}
    projections |= {"outputs": output and not mixer.bias, "convolution": mixer.kernel_bias}
    biases = [name for name, present in projections.items() if present]
    if biases:
        yield f"biases on {' and '.join(biases)}"


def _head_norm(norm: HeadNorm) -> str:
    after = ", after RoPE" if norm.after_rope else ""
    return f"{_norm(norm.norm)} of queries and keys ({OVER[norm.over]}{after})"


def _rope(rope: Rope, attention: Attention) -> str:
    projections = attention.projections
    return _rotation(rope, projections.key_dim if isinstance(projections, HeadProjections) else projections.rope_dim)


def _rotation(rope: Rope, whole: int) -> str:
    part = "" if rope.rotary_dim == whole else f" of {rope.rotary_dim} dimensions"
    pairs = ", interleaved pairs" if rope.interleaved else ""
    scaling = "" if isinstance(rope.scaling, NoScaling) else f", {rope.scaling.type} scaling"
    factor: float | None = getattr(rope.scaling, "factor", None)
    return f"RoPE{part}, base {rope.theta:,.10g}{pairs}{scaling}{'' if factor is None else f' by {factor:g}'}"


def _dense(dense: Dense) -> str:
    match dense:
        case Dense(clamp=Clamp(alpha=alpha, limit=limit, gate_limit=gate_limit)):
            gates = "" if gate_limit is None else f", gates at {gate_limit:.3g}"
            kind = f"gated, clamped at {limit:g}{gates} (alpha {alpha:g})"
        case Dense(xielu=Xielu()):
            kind = "xielu"
        case Dense(gated=True):
            kind = f"gated {dense.activation}"
        case _:
            kind = dense.activation
    norm = "" if dense.inner_norm is None else f", {_norm(dense.inner_norm)} before the projection back"
    scale = "" if dense.gate_scale == 1 else f", gate scaled by {dense.gate_scale:g}"
    cutoff = "" if dense.gate_cutoff is None else f", gate cut off at {dense.gate_cutoff:.3g} standard deviations"
    return f"{kind}, {dense.intermediate_size:,} wide{', with biases' if dense.bias else ''}{norm}{scale}{cutoff}"


def _moe(moe: Experts) -> Iterator[str]:
    yield f"{moe.experts_per_token} of {moe.experts} experts, each {_dense(moe.expert)}"
    if moe.latent is not None:
        yield f"experts on a latent of {moe.latent.width:,}{', with biases' if moe.latent.bias else ''}"
    yield f"router: {_router(moe.router)}"
    if moe.shared is not None:
        yield f"shared expert{', gated' if moe.shared_gate else ''}: {_dense(moe.shared)}"


def _router(router: Router) -> str:
    parts = [router.scoring.replace("_", " ")]
    if router.groups > 1:
        parts.append(f"{router.groups_chosen} of {router.groups} groups")
    if router.token_experts:
        parts.append("experts by token id")
    if router.correction_bias:
        parts.append("correction bias")
    if router.normalize:
        parts.append("normalized")
    if router.expert_scales:
        parts.append("scaled per expert")
    if router.scale != 1:
        parts.append(f"scaled by {router.scale:g}")
    return ", ".join(parts)


def _frame(layer: Layer) -> Iterator[str]:
    places = {
        "before": [block.norm for block in layer.blocks],
        "after": [block.post_norm for block in layer.blocks],
        "after the sum of": [block.joint_norm for block in layer.blocks],
        "after the residual sum of": [block.sum_norm for block in layer.blocks],
    }
    parallel = any(block.parallel for block in layer.blocks)
    for place, norms in places.items():
        present = [norm for norm in norms if norm is not None]
        if present:
            shared = "both blocks" if len(norms) == 2 else "all blocks"
            blocks = "each block" if len(present) == len(norms) else shared if parallel else "one block"
            yield f"{_norm(present[0])} {place} {blocks}"
    if parallel:
        yield "parallel blocks"
    for scale in dict.fromkeys(block.input_scale for block in layer.blocks if block.input_scale != 1):
        yield f"input scale {scale:g}"
    for scale in dict.fromkeys(block.residual_scale for block in layer.blocks if block.residual_scale != 1):
        yield f"residual scale {scale:g}"
    for scale in dict.fromkeys(block.stream_scale for block in layer.blocks if block.stream_scale != 1):
        yield f"stream scale {scale:g}"
    for block in layer.blocks:
        if block.weights_of is not None:
            yield f"{block.name} with the weights of layer {block.weights_of}"
        if block.low_rank:
            yield f"{block.name} with additions of rank {block.low_rank[0].rank:,}"
    yield from (_span(span) for span in layer.spans)
    if any(block.residual_after_norm for block in layer.blocks):
        yield "residual from the normed input"


def _span(span: Span) -> str:
    blocks = count_words(span.blocks, "block")
    match span.mix:
        case Alternating(active=active):
            words = f"on stream {active}, with alternating updates of the others"
        case Side(from_stream=stream):
            words = f"from stream {stream} to the others"
        case Gated(rank=rank):
            words = f"from a gated mean of all streams (rank {rank:,}) to each of them"
        case Sinkhorn(iterations=iterations):
            words = f"from a weighted sum of all streams to their mix ({count_words(iterations, 'iteration')})"
        case Joined():
            words = "on all streams"
    return f"{blocks} {words}"


def _norm(norm: Norm) -> str:
    return f"{norm.type} norm"
