"""Roles of tensors, and the checkpoint's names for them.

A role is the native module's name of a tensor: `layers.3.attention.q.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ferrule.archs.spec import (
    Alternating,
    Attention,
    Block,
    Classifier,
    CompressedAttention,
    DeltaNet,
    Dense,
    Embedding,
    Experts,
    Gated,
    HeadProjections,
    Indexer,
    Joined,
    LatentProjections,
    Laurel,
    Layer,
    LayerNorm,
    LearnedPositions,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ModelSpec,
    NgramEmbedding,
    Norm,
    Part,
    PerLayerEmbedding,
    ProjectedEnds,
    Projection,
    RecurrentMixer,
    RgLru,
    RwkvChannelMix,
    RwkvTimeMix,
    ShortConvolution,
    Side,
    Sinkhorn,
    Span,
    Stack,
    Streams,
    Tensor,
    Weighted,
)


def roles(spec: ModelSpec) -> Iterator[str]:
    """Yields the role of every tensor that a model needs, and of constants that a checkpoint may leave out."""
    yield from _embedding_roles(spec.embedding)
    yield from (f"tables.{index}.weight" for index in range(len(spec.tables)))
    for index, layer in enumerate(spec.layers):
        yield from (f"layers.{index}.{role}" for block in layer.blocks for role in _block_roles(block))
        yield from (f"layers.{index}.{span.name}.{role}" for span in layer.spans for role in _span_roles(span))
        if layer.scalar:
            yield f"layers.{index}.scalar.weight"
    if spec.streams is not None:
        yield from _end_roles(spec.streams)
    yield from _norm_roles("final_norm", spec.final_norm)
    if spec.lm_head is not None:
        if spec.embedding.width is not None:
            yield "lm_head_projection.weight"
        if not spec.lm_head.tied:
            yield "lm_head.weight"
        if spec.lm_head.bias:
            yield "lm_head.bias"
    if spec.classifier is not None:
        yield from _classifier_roles(spec.classifier)
    for index, projection in enumerate(spec.text_projections):
        yield from _projection_roles(f"text_projections.{index}", bias=projection.bias)


def _embedding_roles(embedding: Embedding) -> Iterator[str]:
    if embedding.tokens:
        yield "embedding.weight"
    if embedding.width is not None:
        yield from _projection_roles("embedding_projection", bias=embedding.projection_bias)
    if isinstance(embedding.positions, LearnedPositions):
        yield "positions.weight"
    if embedding.token_types:
        yield "token_types.weight"
    yield from _norm_roles("embedding_norm", embedding.norm)


@dataclass(frozen=True)
class Fused:
    """A stored tensor that holds several roles, see `fused`, or several that hold one, see `joined`."""

    name: str | tuple[str, ...]
    part: Part | None = None
    transposed: bool = False
    stack: int | None = None


def fused(
    name: str, rows: Mapping[str, int] | str, *, transposed: bool = False, stack: int | None = None
) -> dict[str, Fused]:
    """Returns entries for `tensors_named` of roles that share one tensor.

    `rows` gives the rows of each role in their order; the order repeats if the roles have a multiple of these rows. A
    single role may be given by name. `transposed` is for tensors stored as [inputs, outputs]; `stack` is the number of
    experts if one tensor holds all of them.
    """
    if isinstance(rows, str):
        return {rows: Fused(name, None, transposed, stack)}
    entries: dict[str, Fused] = {}
    first, stride = 0, sum(rows.values())
    for role, count in rows.items():
        entries[role] = Fused(name, Part(first, count, stride), transposed, stack)
        first += count
    return entries


def joined(role: str, *names: str) -> dict[str, Fused]:
    """Returns an entry for `tensors_named` of a role whose rows are those of several stored tensors, in order."""
    return {role: Fused(names)}


def tensors_named(
    spec: ModelSpec,
    modules: Mapping[str, str | Fused],
    known: Mapping[str, Tensor] | None = None,
    alternatives: Mapping[str, str | Fused] | None = None,
) -> dict[str, Tensor]:
    """Returns the checkpoint's tensor for each role of `spec`; entries of `known` are kept.

    `modules` maps a role without its `layers.N.`, an expert's number and `.weight` to the checkpoint's module:
    `{"attention.q": "model.layers.{layer}.self_attn.q_proj"}`. `{layer}` stands for the layer's index, `{expert}` for
    the expert's, `{head}` for each head if the heads have separate tensors. A role with `.weight` or `.bias`
    takes precedence over one without, and names the tensor itself. `alternatives` has the modules of roles that other
    checkpoints store under another name. Experts that are stored one by one may also be stacked, and the reverse, if
    the name contains `.experts.` and the experts have no biases.
    """
    tensors: dict[str, Tensor] = {}
    for role in roles(spec):
        if known is not None and role in known:
            tensors[role] = known[role]
            continue
        tensor = _tensor(spec, role, modules)
        if tensor is None:
            raise LookupError(f"no module for the role {role}")
        alternative = _tensor(spec, role, alternatives or {}) or _experts_otherwise(spec, role, tensor)
        tensors[role] = replace(tensor, alternative=alternative)
    return tensors


_EXPERT = re.compile(r"layers\.(\d+)\.(\w+)\.experts\.(\d+)\.(gate|up|down)\.weight")
"""The role of an expert's matrix."""


def _experts_otherwise(spec: ModelSpec, role: str, tensor: Tensor) -> Tensor | None:
    """Returns where checkpoints with the other layout of experts have a matrix; None for other roles.

    One by one they are `experts.0.gate_proj.weight`. Stacked, as transformers 5 has them in memory, they are
    `experts.gate_up_proj: [experts, 2 * width, hidden_size]`, gate first, and `experts.down_proj`.
    """
    match = _EXPERT.fullmatch(role)
    if match is None:
        return None
    layer, block, expert, projection = match.groups()
    mixer, name = spec.layers[int(layer)].block(block).mixer, tensor.names[0]
    if not isinstance(mixer, Experts) or mixer.expert.bias:
        return None
    if tensor.stack is not None:
        stem, dot, _ = name.rpartition(".experts.")
        return Tensor((f"{stem}{dot}{expert}.{projection}_proj.weight",)) if dot else None
    stem, dot, _ = name.rpartition(f".experts.{expert}.")
    if not dot:
        return None
    stack = Stack(int(expert), mixer.experts)
    stem = f"{stem}.experts"
    if projection == "down" or not mixer.expert.gated:
        return Tensor((f"{stem}.{projection}_proj",), stack=stack)
    width = mixer.expert.intermediate_size
    return Tensor((f"{stem}.gate_up_proj",), part=Part(width * (projection == "up"), width, 2 * width), stack=stack)


def _tensor(spec: ModelSpec, role: str, modules: Mapping[str, str | Fused]) -> Tensor | None:
    """Returns the tensor of a role; None if `modules` has no entry for it."""
    path = role.split(".")
    numbers = {"layer": "", "expert": ""}
    if path[0] == "layers":
        numbers["layer"], path = path[1], path[2:]
    for part in ("experts", "heads"):
        if part in path:
            numbers["expert"] = path.pop(path.index(part) + 1)
    whole, (*module, parameter) = ".".join(path), path
    found = modules.get(whole, modules.get(".".join(module)))
    if found is None:
        return None
    entry = Fused(found) if isinstance(found, str) else found
    names = [entry.name] if isinstance(entry.name, str) else entry.name
    names = [name if whole in modules else f"{name}.{parameter}" for name in names]
    heads = _heads(spec.layers[int(numbers["layer"])], whole) if "{head}" in names[0] else 1
    return Tensor(
        tuple(name.format(**numbers, head=head) for name in names for head in range(heads)),
        transposed=entry.transposed,
        part=entry.part,
        stack=None if entry.stack is None else Stack(int(numbers["expert"]), entry.stack),
    )


def _heads(layer: Layer, role: str) -> int:
    """Number of heads of a query or key norm."""
    name, norm, *_ = role.split(".")
    attention = layer.block(name).mixer
    if not isinstance(attention, Attention):
        raise LookupError(f"{role} belongs to no attention")
    projections = attention.projections
    if norm.startswith("k_") and isinstance(projections, HeadProjections):
        return projections.kv_heads
    return attention.heads


def _block_roles(block: Block) -> Iterator[str]:
    for index in range(len(block.low_rank)):
        yield from (f"{block.name}.low_rank.{index}.{half}.weight" for half in ("a", "b"))
    if block.weights_of is not None:
        return
    yield from _norm_roles(f"{block.name}_norm", block.norm)
    yield from (f"{block.name}.{role}" for role in _mixer_roles(block.mixer))
    yield from _norm_roles(f"{block.name}_post_norm", block.post_norm)
    yield from _norm_roles(f"{block.name}_sum_norm", block.sum_norm)
    yield from _norm_roles(f"{block.name}_joint_norm", block.joint_norm)


def _mixer_roles(mixer: Mixer) -> Iterator[str]:
    match mixer:
        case Attention():
            roles = _attention_roles(mixer)
        case CompressedAttention():
            roles = _compressed_roles(mixer)
        case Dense():
            roles = _dense_roles(mixer)
        case Experts():
            roles = _expert_roles(mixer)
        case PerLayerEmbedding():
            roles = _per_layer_roles(mixer)
        case Projection():
            roles = _projection_roles("output", bias=mixer.bias)
        case Laurel():
            roles = iter(("left.weight", "right.weight", *_norm_roles("norm", mixer.norm)))
        case _:
            roles = _recurrent_roles(mixer)
    return roles


def _recurrent_roles(mixer: RecurrentMixer) -> Iterator[str]:
    match mixer:
        case ShortConvolution():
            roles = _convolution_roles(mixer)
        case DeltaNet():
            roles = _delta_net_roles(mixer)
        case LightningAttention():
            roles = _lightning_roles(mixer)
        case Mamba():
            roles = _mamba_roles(mixer)
        case Mamba2():
            roles = _mamba2_roles(mixer)
        case NgramEmbedding():
            roles = _ngram_roles(mixer)
        case RgLru():
            roles = _rg_lru_roles(mixer)
        case RwkvTimeMix():
            roles = _time_mix_roles()
        case RwkvChannelMix():
            roles = _channel_mix_roles()
    return roles


def _attention_roles(attention: Attention) -> Iterator[str]:
    match attention.projections:
        case HeadProjections() as heads:
            normed = ("q",) if attention.kv_layer is not None else ("q", "k")
            has_values = attention.kv_layer is None and not heads.values_are_keys
            for projection in (*normed, "v") if has_values else normed:
                yield from _projection_roles(projection, bias=heads.bias)
            if heads.qk_norm is not None:
                for projection in normed:
                    yield from _norm_roles(f"{projection}_norm", heads.qk_norm.norm)
            yield from _norm_roles("v_norm", heads.v_norm)
        case LatentProjections() as latent:
            if latent.query_rank is None:
                yield "q.weight"
            else:
                yield from _projection_roles("q_a", bias=latent.bias)
                yield from _norm_roles("q_a_norm", latent.norm)
                yield "q_b.weight"
            yield from _projection_roles("kv_a", bias=latent.bias)
            yield from _norm_roles("kv_a_norm", latent.norm)
            yield from ("k_b.weight", "v_b.weight") if latent.split else ("kv_b.weight",)
    yield from _projection_roles("output", bias=attention.output_bias)
    yield from _norm_roles("output_norm", attention.output_norm)
    if attention.sinks:
        yield "sinks.weight"
    if attention.output_gate is not None:
        yield from _projection_roles("gate", bias=attention.gate_bias)
    if attention.indexer is not None:
        yield from (f"indexer.{role}" for role in _indexer_roles(attention.indexer))


def _indexer_roles(indexer: Indexer) -> Iterator[str]:
    yield from ("q.weight", "k.weight")
    if indexer.choice == "together":
        yield "weights.weight"
    yield from _norm_roles("q_norm", indexer.q_norm)
    yield from _norm_roles("k_norm", indexer.k_norm)


def _compressed_roles(attention: CompressedAttention) -> Iterator[str]:
    norm, compression = attention.norm, attention.compression
    yield from (
        "q_a.weight",
        *_norm_roles("q_a_norm", norm),
        "q_b.weight",
        *_norm_roles("q_norm", attention.query_norm),
    )
    yield from ("kv.weight", *_norm_roles("kv_norm", norm), "sinks.weight")
    if compression is not None:
        yield from (f"compressor.{role}.weight" for role in ("values", "gates", "bias"))
        yield from _norm_roles("compressor.norm", norm)
        if compression.indexer is not None:
            yield from (f"indexer.{role}.weight" for role in ("q", "weights", "values", "gates", "bias"))
            yield from _norm_roles("indexer.norm", norm)
    yield from (f"output_{group}.weight" for group in range(attention.output_groups))
    yield "output.weight"


def _convolution_roles(convolution: ShortConvolution) -> Iterator[str]:
    for role in ("b", "c", "x", "kernel", "output"):
        yield from _projection_roles(role, bias=convolution.bias)


def _delta_net_roles(delta_net: DeltaNet) -> Iterator[str]:
    yield from ("q.weight", "k.weight", "v.weight", "factor.weight")
    for role, rank in (("decay", delta_net.decay.rank), ("gate", delta_net.gate_rank)):
        yield from [f"{role}.weight"] if rank is None else [f"{role}_a.weight", f"{role}_b.weight"]
    yield from ("kernel.weight", "decay_log.weight", "decay_bias.weight")
    yield from _norm_roles("norm", delta_net.norm)
    yield "output.weight"


def _lightning_roles(lightning: LightningAttention) -> Iterator[str]:
    yield from ("q.weight", "k.weight", "v.weight", "gate.weight")
    yield from _norm_roles("norm", lightning.norm)
    yield "output.weight"


def _mamba_roles(mamba: Mamba) -> Iterator[str]:
    for role in ("x", "gate"):
        yield from _projection_roles(role, bias=mamba.bias)
    yield from _projection_roles("kernel", bias=mamba.kernel_bias)
    yield from ("step_in.weight", "b.weight", "c.weight")
    for role in ("step_norm", "b_norm", "c_norm"):
        yield from _norm_roles(role, mamba.norm)
    yield from ("step.weight", "step_bias.weight", "decay_log.weight", "skip.weight")
    yield from _projection_roles("output", bias=mamba.bias)


def _mamba2_roles(mamba2: Mamba2) -> Iterator[str]:
    for role in ("gate", "x", "b", "c", "step"):
        yield from _projection_roles(role, bias=mamba2.bias)
    yield from _projection_roles("kernel", bias=mamba2.kernel_bias)
    yield from ("decay_log.weight", "step_bias.weight", "skip.weight")
    yield from _norm_roles("norm", mamba2.norm)
    yield from _projection_roles("output", bias=mamba2.output_bias)


def _per_layer_roles(per_layer: PerLayerEmbedding) -> Iterator[str]:
    yield from ("gate.weight", "projection.weight")
    yield from _norm_roles("projection_norm", per_layer.norm)
    yield "output.weight"


def _ngram_roles(ngram: NgramEmbedding) -> Iterator[str]:
    yield from ("key.weight", "value.weight")
    for role in ("key_norm", "query_norm", "kernel_norm"):
        yield from _norm_roles(role, ngram.norm)
    yield from ("kernel.weight", "multipliers", "hash_rows", "first_rows")


def _span_roles(span: Span) -> Iterator[str]:
    match span.mix:
        case Alternating() as alternating:
            yield from ("prediction.weight", "correction.weight")
            yield from _norm_roles("router_norm", alternating.norm)
            yield "router.weight"
        case Side() as side:
            if side.scaled:
                yield "scale.weight"
        case Gated() as gated:
            yield from _gated_roles(gated)
            yield "inject.weight"
        case Sinkhorn() as sinkhorn:
            yield from _weighted_roles(sinkhorn)
        case Joined():
            pass


def _gated_roles(gated: Gated) -> Iterator[str]:
    yield from _norm_roles("norm", gated.norm)
    yield from ("down.weight", "up.weight")


def _weighted_roles(weighted: Weighted | Sinkhorn) -> Iterator[str]:
    yield from _norm_roles("norm", weighted.norm)
    yield from ("mix.weight", "base.weight", "scale.weight")


def _end_roles(streams: Streams) -> Iterator[str]:
    match streams.ends:
        case ProjectedEnds():
            yield from (f"streams.{end}.{n}.weight" for end in ("begin", "end") for n in range(1, streams.count))
        case Gated() as gated:
            yield from (f"streams.end.{role}" for role in _gated_roles(gated))
        case Weighted() as weighted:
            yield from (f"streams.end.{role}" for role in _weighted_roles(weighted))


def _rg_lru_roles(rg_lru: RgLru) -> Iterator[str]:
    for role in ("x", "gate", "kernel", "output"):
        yield from _projection_roles(role, bias=True)
    for head in range(rg_lru.heads):
        for role in ("input_gate", "decay_gate"):
            yield from _projection_roles(f"heads.{head}.{role}", bias=True)
    yield "decay.weight"


def _time_mix_roles() -> Iterator[str]:
    yield from ("decay_log.weight", "bonus.weight")
    yield from (f"{role}_mix.weight" for role in ("k", "v", "receptance"))
    yield from (f"{role}.weight" for role in ("k", "v", "receptance", "output"))


def _channel_mix_roles() -> Iterator[str]:
    yield from ("up_mix.weight", "receptance_mix.weight", "up.weight", "receptance.weight", "down.weight")


def _classifier_roles(classifier: Classifier) -> Iterator[str]:
    if classifier.activation is not None:
        yield from _projection_roles("classifier.dense", bias=classifier.dense_bias)
    yield from _norm_roles("classifier.norm", classifier.norm)
    yield from _projection_roles("classifier", bias=classifier.bias)


def _expert_roles(experts: Experts) -> Iterator[str]:
    yield from _projection_roles("router", bias=experts.router.bias)
    yield from _norm_roles("router_norm", experts.router.norm)
    yield from _norm_roles("input_norm", experts.norm)
    if experts.router.expert_scales:
        yield "router.scales"
    if experts.router.correction_bias:
        yield "router.correction_bias"
    if experts.router.token_experts:
        yield "router.token_experts"
    if experts.latent is not None:
        for role in ("latent_in", "latent_out"):
            yield from _projection_roles(role, bias=experts.latent.bias)
    for expert in range(experts.experts):
        yield from (f"experts.{expert}.{role}" for role in _dense_roles(experts.expert))
    if experts.shared is not None:
        yield from (f"shared.{role}" for role in _dense_roles(experts.shared))
    if experts.shared_gate:
        yield "shared_gate.weight"


def _dense_roles(ffn: Dense) -> Iterator[str]:
    for projection in ("gate", "up", "down") if ffn.gated else ("up", "down"):
        yield from _projection_roles(projection, bias=ffn.bias)
    yield from _norm_roles("inner_norm", ffn.inner_norm)
    if ffn.xielu is not None and ffn.xielu.alphas is None:
        yield from ("xielu.alpha_p", "xielu.alpha_n")


def _norm_roles(at: str, norm: Norm | None) -> Iterator[str]:
    if norm is None:
        return
    if norm.weight:
        yield f"{at}.weight"
    if isinstance(norm, LayerNorm) and norm.bias:
        yield f"{at}.bias"


def _projection_roles(at: str, *, bias: bool) -> Iterator[str]:
    yield f"{at}.weight"
    if bias:
        yield f"{at}.bias"
