"""Tensor names of GGUF files: one table for all architectures.

A role may have several names, and a file has one of them. llama.cpp's converters fuse, split and stack some matrices;
the tensors that a file has show which ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ferrule._loading.gguf.file import GgufFile
from ferrule.archs.spec import (
    Attention,
    Block,
    CompressedAttention,
    DeltaNet,
    Dense,
    Experts,
    HeadProjections,
    LatentProjections,
    Layer,
    LightningAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    Part,
    PerLayerEmbedding,
    ShortConvolution,
    Stack,
    Tensor,
)
from ferrule.archs.tensors import Fused, fused, joined, tensors_named

NAMES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("token_embd",),
    "embedding_norm": ("token_embd_norm",),
    "positions": ("position_embd",),
    "token_types": ("token_types",),
    "attention_norm": ("blk.{layer}.attn_norm",),
    "attention.q": ("blk.{layer}.attn_q",),
    "attention.k": ("blk.{layer}.attn_k",),
    "attention.v": ("blk.{layer}.attn_v",),
    "attention.gate": ("blk.{layer}.attn_gate",),
    "attention.q_norm": ("blk.{layer}.attn_q_norm",),
    "attention.k_norm": ("blk.{layer}.attn_k_norm",),
    "attention.q_a": ("blk.{layer}.attn_q_a",),
    "attention.q_a_norm": ("blk.{layer}.attn_q_a_norm",),
    "attention.q_b": ("blk.{layer}.attn_q_b",),
    "attention.kv_a": ("blk.{layer}.attn_kv_a_mqa",),
    "attention.kv_a_norm": ("blk.{layer}.attn_kv_a_norm",),
    "attention.kv_b": ("blk.{layer}.attn_kv_b",),
    "attention.k_b": ("blk.{layer}.attn_k_b",),
    "attention.v_b": ("blk.{layer}.attn_v_b",),
    "attention.sinks": ("blk.{layer}.attn_sinks",),
    "attention.indexer.q": ("blk.{layer}.indexer.attn_q_b",),
    "attention.indexer.k": ("blk.{layer}.indexer.attn_k",),
    "attention.indexer.q_norm": ("blk.{layer}.indexer.q_norm",),
    "attention.indexer.k_norm": ("blk.{layer}.indexer.k_norm",),
    "attention.indexer.weights": ("blk.{layer}.indexer.proj",),
    "attention.output_norm": ("blk.{layer}.attn_sub_norm",),
    "attention.output": ("blk.{layer}.attn_output",),
    "compressed_attention_norm": ("blk.{layer}.attn_norm",),
    "compressed_attention.q_a": ("blk.{layer}.attn_q_a",),
    "compressed_attention.q_a_norm": ("blk.{layer}.attn_q_a_norm",),
    "compressed_attention.q_b": ("blk.{layer}.attn_q_b",),
    "compressed_attention.kv": ("blk.{layer}.attn_kv",),
    "compressed_attention.kv_norm": ("blk.{layer}.attn_kv_a_norm",),
    "compressed_attention.sinks": ("blk.{layer}.attn_sinks",),
    "compressed_attention.output": ("blk.{layer}.attn_output_b",),
    "compressed_attention.indexer.q": ("blk.{layer}.indexer.attn_q_b",),
    "compressed_attention.indexer.weights": ("blk.{layer}.indexer.proj",),
    **{
        f"compressed_attention.{role}.{part}": (f"blk.{{layer}}.{module}_compressor_{name}",)
        for role, module in (("compressor", "attn"), ("indexer", "indexer"))
        for part, name in (("values", "kv"), ("gates", "gate"), ("bias", "ape"), ("norm", "norm"))
    },
    "attention_post_norm": ("blk.{layer}.post_attention_norm",),
    "attention_sum_norm": ("blk.{layer}.attn_output_norm",),
    "ffn_norm": ("blk.{layer}.ffn_norm",),
    "ffn.gate": ("blk.{layer}.ffn_gate",),
    "ffn.up": ("blk.{layer}.ffn_up",),
    "ffn.down": ("blk.{layer}.ffn_down",),
    "ffn.inner_norm": ("blk.{layer}.ffn_sub_norm",),
    "ffn.router": ("blk.{layer}.ffn_gate_inp",),
    "ffn.router.correction_bias": ("blk.{layer}.exp_probs_b.bias", "blk.{layer}.exp_probs_b"),
    "ffn.router.token_experts": ("blk.{layer}.ffn_gate_tid2eid.weight",),
    "ffn.latent_in": ("blk.{layer}.ffn_latent_down",),
    "ffn.latent_out": ("blk.{layer}.ffn_latent_up",),
    "ffn.experts.gate": ("blk.{layer}.ffn_gate.{expert}",),
    "ffn.experts.up": ("blk.{layer}.ffn_up.{expert}",),
    "ffn.experts.down": ("blk.{layer}.ffn_down.{expert}",),
    "ffn.shared.gate": ("blk.{layer}.ffn_gate_shexp",),
    "ffn.shared.up": ("blk.{layer}.ffn_up_shexp",),
    "ffn.shared.down": ("blk.{layer}.ffn_down_shexp",),
    "ffn.shared_gate": ("blk.{layer}.ffn_gate_inp_shexp",),
    "ffn_post_norm": ("blk.{layer}.post_ffw_norm",),
    "ffn_sum_norm": ("blk.{layer}.layer_output_norm",),
    "moe_joint_norm": ("blk.{layer}.post_ffw_norm",),
    "moe_post_norm": ("blk.{layer}.post_ffw_norm_2",),
    "moe.input_norm": ("blk.{layer}.pre_ffw_norm_2",),
    "moe.router": ("blk.{layer}.ffn_gate_inp",),
    "moe.router_norm.weight": ("blk.{layer}.ffn_gate_inp.scale",),
    "moe.router.scales": ("blk.{layer}.ffn_down_exps.scale",),
    "per_layer.gate": ("blk.{layer}.inp_gate",),
    "per_layer.output": ("blk.{layer}.proj",),
    "per_layer.projection_norm": ("per_layer_proj_norm",),
    "per_layer_post_norm": ("blk.{layer}.post_norm",),
    "tables.0": ("per_layer_token_embd",),
    "laurel.left": ("blk.{layer}.laurel_l",),
    "laurel.right": ("blk.{layer}.laurel_r",),
    "laurel.norm": ("blk.{layer}.laurel_post_norm",),
    "altup.router": ("blk.{layer}.altup_router",),
    "altup.router_norm": ("blk.{layer}.altup_router_norm",),
    "altup.prediction": ("blk.{layer}.altup_predict_coef",),
    "altup.correction": ("blk.{layer}.altup_correct_coef",),
    "side.scale": ("blk.{layer}.altup_correct_scale",),
    "short_convolution_norm": ("blk.{layer}.attn_norm",),
    "short_convolution.kernel": ("blk.{layer}.shortconv.conv",),
    "short_convolution.output": ("blk.{layer}.shortconv.out_proj",),
    "delta_net_norm": ("blk.{layer}.attn_norm",),
    "delta_net.q": ("blk.{layer}.attn_q",),
    "delta_net.k": ("blk.{layer}.attn_k",),
    "delta_net.v": ("blk.{layer}.attn_v",),
    "delta_net.gate": ("blk.{layer}.attn_gate",),
    "delta_net.gate_a": ("blk.{layer}.ssm_g_a",),
    "delta_net.gate_b": ("blk.{layer}.ssm_g_b",),
    "delta_net.decay_a": ("blk.{layer}.ssm_f_a",),
    "delta_net.decay_b": ("blk.{layer}.ssm_f_b",),
    "delta_net.factor": ("blk.{layer}.ssm_beta",),
    "delta_net.decay": ("blk.{layer}.ssm_alpha",),
    "delta_net.kernel": ("blk.{layer}.ssm_conv1d",),
    "delta_net.decay_log.weight": ("blk.{layer}.ssm_a",),
    "delta_net.decay_bias.weight": ("blk.{layer}.ssm_dt.bias",),
    "delta_net.norm": ("blk.{layer}.ssm_norm",),
    "delta_net.output": ("blk.{layer}.ssm_out", "blk.{layer}.attn_output"),
    "lightning_attention_norm": ("blk.{layer}.attn_norm",),
    "lightning_attention.gate": ("blk.{layer}.attn_gate",),
    "lightning_attention.norm": ("blk.{layer}.attn_norm_2",),
    "lightning_attention.output": ("blk.{layer}.attn_output",),
    "mamba_norm": ("blk.{layer}.attn_norm",),
    "mamba.kernel": ("blk.{layer}.ssm_conv1d",),
    "mamba.step_norm": ("blk.{layer}.ssm_dt_norm",),
    "mamba.b_norm": ("blk.{layer}.ssm_b_norm",),
    "mamba.c_norm": ("blk.{layer}.ssm_c_norm",),
    "mamba.step": ("blk.{layer}.ssm_dt",),
    "mamba.step_bias.weight": ("blk.{layer}.ssm_dt.bias",),
    "mamba.decay_log.weight": ("blk.{layer}.ssm_a",),
    "mamba.skip.weight": ("blk.{layer}.ssm_d",),
    "mamba.output": ("blk.{layer}.ssm_out",),
    "mamba2_norm": ("blk.{layer}.attn_norm",),
    "mamba2.kernel": ("blk.{layer}.ssm_conv1d",),
    "mamba2.decay_log.weight": ("blk.{layer}.ssm_a",),
    "mamba2.step_bias.weight": ("blk.{layer}.ssm_dt.bias",),
    "mamba2.skip.weight": ("blk.{layer}.ssm_d",),
    "mamba2.norm": ("blk.{layer}.ssm_norm",),
    "mamba2.output": ("blk.{layer}.ssm_out",),
    **{
        f"{span}_streams.{role}": (f"blk.{{layer}}.hc_{module}_{name}",)
        for span, module in (("attention", "attn"), ("ffn", "ffn"))
        for role, name in (("mix", "fn"), *((role, role) for role in ("base", "scale", "norm", "down", "up", "inject")))
    },
    **{
        f"streams.end.{role}": (f"output_hc_{name}",)
        for role, name in (("mix", "fn"), *((role, role) for role in ("base", "scale", "norm", "down", "up")))
    },
    "ngram.key": ("blk.{layer}.ple_key",),
    "ngram.value": ("blk.{layer}.ple_value",),
    "ngram.key_norm": ("blk.{layer}.ple_norm_key",),
    "ngram.query_norm": ("blk.{layer}.ple_norm_query",),
    "ngram.kernel_norm": ("blk.{layer}.ple_norm_conv",),
    "ngram.kernel": ("blk.{layer}.ple_conv1d",),
    # Checkpoints may have the constants of the hashes as tensors; GGUF files have them in the metadata.
    **{f"ngram.{role}": (f"blk.{{layer}}.ple_{role}",) for role in ("multipliers", "hash_rows", "first_rows")},
    "scalar": ("blk.{layer}.layer_output_scale",),
    "final_norm": ("output_norm", "token_embd_norm"),
    "lm_head": ("output",),
}
"""Module names of each role, preferred name first; roles with `.weight` and the router's bias have tensor names."""

STACKED = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
"""Tensors that stack the matrices of all experts; early MoE files have a tensor for each expert."""

POSITIVE_RATES = ("bailingmoe3",)
"""Architectures whose files have the rates of decays as exp(x) of what checkpoints have, not as -exp(x)."""


def gguf_tensors(spec: ModelSpec, file: GgufFile) -> dict[str, Tensor]:
    """Returns the tensor of the file for each role of `spec`."""
    modules: dict[str, str | Fused] = {role: _present(names, file) for role, names in NAMES.items()}
    for index, layer in enumerate(spec.layers):
        for block in layer.blocks:
            modules |= _fused(block, index, file)
    has_post_norm = any(block.post_norm is not None for layer in spec.layers for block in layer.blocks)
    if any([block.name for block in layer.blocks] == ["ffn"] for layer in spec.layers):
        # In layers of one block, all blocks have the same name for their norm.
        modules["ffn_norm"] = "blk.{layer}.attn_norm"
    elif not has_post_norm and "ffn_norm.weight" not in file.in_layers:
        # Some files name the norm before the feed-forward network as the norm after attention.
        modules["ffn_norm"] = _present(("blk.{layer}.post_attention_norm", "blk.{layer}.ffn_norm"), file)
    if "ffn_norm" in file.in_layers:
        modules["ffn_norm.weight"] = "blk.{layer}.ffn_norm"
    if "attn_norm_2.weight" in file.in_layers and spec.architecture == "falcon":
        # In Falcon's large models the first norm belongs to the feed-forward network.
        modules |= {"attention_norm": "blk.{layer}.attn_norm_2", "ffn_norm": "blk.{layer}.attn_norm"}
    if "post_ffw_norm_1.weight" in file.in_layers:
        # Networks beside experts have a separate norm; that of the sum is under the usual name.
        modules["ffn_post_norm"] = "blk.{layer}.post_ffw_norm_1"
    tensors = tensors_named(spec, modules, {**_per_layer_projections(spec), **_stream_projections(spec)})
    exponential = "exp" if file.architecture in POSITIVE_RATES else "negated_exp"
    return {
        role: replace(tensor, exponential=exponential) if role.endswith(".decay_log.weight") else tensor
        for role, tensor in tensors.items()
    }


def _per_layer_projections(spec: ModelSpec) -> dict[str, Tensor]:
    """Returns the tensors of the layers' projections to per-layer embeddings: rows of one matrix."""
    widths = [layer.mixers(PerLayerEmbedding)[0].width for layer in spec.layers if layer.mixers(PerLayerEmbedding)]
    return {
        f"layers.{index}.per_layer.projection.weight": Tensor(
            ("per_layer_model_proj.weight",), part=Part(index * width, width, sum(widths))
        )
        for index, width in enumerate(widths)
    }


def _stream_projections(spec: ModelSpec) -> dict[str, Tensor]:
    """Returns the tensors of the projections between the streams: matrices of a stack without the first stream."""
    others = 0 if spec.streams is None else spec.streams.count - 1
    return {
        f"streams.{end}.{index + 1}.weight": Tensor((f"{name}.weight",), stack=Stack(index, others))
        for end, name in (("begin", "altup_proj"), ("end", "altup_unembd_proj"))
        for index in range(others)
    }


def _fused(block: Block, layer: int, file: GgufFile) -> dict[str, Fused]:
    """Returns the roles of the mixer of a block of layer `layer` that share tensors."""
    entries: dict[str, Fused] = {}
    mixer = block.mixer
    match mixer:
        case Attention(projections=HeadProjections() as projections):
            entries = _attention(mixer, projections, layer, file)
        case CompressedAttention(output_groups=groups, output_rank=rank):
            rows = {f"compressed_attention.output_{group}": rank for group in range(groups)}
            entries = fused("blk.{layer}.attn_output_a", rows)
        case Dense(gated=True, intermediate_size=width) if "ffn_gate.weight" not in file.in_layers:
            entries = fused("blk.{layer}.ffn_up", {"ffn.gate": width, "ffn.up": width})
        case Experts(experts=experts):
            entries = _stacks(block.name, mixer, experts, file)
        case ShortConvolution(channels=channels):
            rows = {f"short_convolution.{role}": channels for role in ("b", "c", "x")}
            entries = fused("blk.{layer}.shortconv.in_proj", rows)
        case LightningAttention(head_dim=width):
            rows = {f"lightning_attention.{role}": width for role in ("q", "k", "v")}
            entries = fused("blk.{layer}.attn_qkv", rows)
        case DeltaNet():
            entries = _delta_net(mixer, file)
        case Mamba(channels=channels, step_rank=rank, state_size=state):
            inner = {"mamba.step_in": rank, "mamba.b": state, "mamba.c": state}
            rows = {"mamba.x": channels, "mamba.gate": channels}
            entries = {**fused("blk.{layer}.ssm_in", rows), **fused("blk.{layer}.ssm_x", inner)}
        case Mamba2(heads=heads, head_dim=head_dim, groups=groups, state_size=state):
            inner, keys = heads * head_dim, groups * state
            rows = {"gate": inner, "x": inner, "b": keys, "c": keys, "step": heads}
            entries = fused("blk.{layer}.ssm_in", {f"mamba2.{role}": count for role, count in rows.items()})
        case _:
            pass
    return entries


def _attention(attention: Attention, projections: HeadProjections, layer: int, file: GgufFile) -> dict[str, Fused]:
    width, entries = projections.key_dim, dict[str, Fused]()
    if attention.indexer is not None:
        for role in ("q", "k"):
            entries |= joined(f"attention.indexer.{role}", f"blk.{{layer}}.indexer.{role}_proj")
    if f"blk.{layer}.attn_qkv.weight" in file:
        keys, values = projections.kv_heads * width, projections.kv_heads * projections.value_dim
        rows = {"attention.q": attention.heads * width, "attention.k": keys, "attention.v": values}
        return entries | fused("blk.{layer}.attn_qkv", rows)
    if attention.output_gate == "elements" and f"blk.{layer}.attn_gate.weight" not in file:
        return entries | fused("blk.{layer}.attn_q", {"attention.q": width, "attention.gate": width})
    return entries


def _delta_net(mixer: DeltaNet, file: GgufFile) -> dict[str, Fused]:
    keys, group = mixer.key_heads * mixer.key_dim, mixer.value_heads // mixer.key_heads
    rows = {"delta_net.q": keys, "delta_net.k": keys, "delta_net.v": mixer.value_heads * mixer.value_dim}
    entries = fused("blk.{layer}.attn_qkv", rows) if "attn_qkv.weight" in file.in_layers else {}
    if mixer.decay.by_key:
        # These are whole matrices in Ling 3, and of low rank in Kimi Linear.
        entries |= joined("delta_net.decay", "blk.{layer}.ssm_f_a") | joined("delta_net.gate", "blk.{layer}.ssm_g_a")
    if "ssm_conv1d_q.weight" in file.in_layers:
        entries |= joined("delta_net.kernel", *(f"blk.{{layer}}.ssm_conv1d_{role}" for role in ("q", "k", "v")))
    if "ssm_in.weight" in file.in_layers:
        # Early files have the rows in the order of the original checkpoint, by key head.
        values = group * mixer.value_dim
        rows = {"q": mixer.key_dim, "k": mixer.key_dim, "v": values, "gate": values}
        entries = fused("blk.{layer}.ssm_in", {f"delta_net.{role}": count for role, count in rows.items()})
    if "ssm_ba.weight" in file.in_layers:
        entries |= fused("blk.{layer}.ssm_ba", {"delta_net.factor": group, "delta_net.decay": group})
    return entries


def with_split_latents(spec: ModelSpec, file: GgufFile) -> ModelSpec:
    """Returns the spec with key and value projections from the latent that are separate tensors, as in newer files."""
    if "attn_k_b.weight" not in file.in_layers:
        return spec
    return replace(spec, layers=[_with_split_latents(layer) for layer in spec.layers])


def _with_split_latents(layer: Layer) -> Layer:
    blocks = (
        replace(block, mixer=replace(block.mixer, projections=replace(block.mixer.projections, split=True)))
        if isinstance(block.mixer, Attention) and isinstance(block.mixer.projections, LatentProjections)
        else block
        for block in layer.blocks
    )
    return replace(layer, blocks=tuple(blocks))


def _stacks(name: str, ffn: Experts, experts: int, file: GgufFile) -> dict[str, Fused]:
    entries: dict[str, Fused] = {}
    for role, tensor in STACKED.items():
        if f"{tensor}.weight" in file.in_layers:
            entries |= fused(f"blk.{{layer}}.{tensor}", f"{name}.experts.{role}", stack=experts)
    if "ffn_gate_up_exps.weight" in file.in_layers:
        width = ffn.expert.intermediate_size
        rows = {f"{name}.experts.gate": width, f"{name}.experts.up": width}
        entries |= fused("blk.{layer}.ffn_gate_up_exps", rows, stack=experts)
    return entries


def _present(names: tuple[str, ...], file: GgufFile) -> str:
    """Returns the first name for which the file or its layers have a tensor, with or without `.weight`."""
    for name in names:
        last = name.removeprefix("blk.{layer}.")
        if {last, f"{last}.weight"} & file.in_layers or f"{name}.weight" in file:
            return name
    return names[0]
