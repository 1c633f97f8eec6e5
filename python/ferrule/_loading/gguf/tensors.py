"""Tensor names of GGUF files: one table for all architectures.

A role may have several names, and a file has one of them. llama.cpp's converters fuse, split and stack some matrices;
the tensors that a file has show which ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from ferrule._loading.gguf.file import GgufFile
from ferrule.archs.spec import Attention, Dense, Experts, HeadProjections, LatentProjections, ModelSpec, Tensor
from ferrule.archs.tensors import Fused, fused, tensors_named

NAMES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("token_embd",),
    "embedding_norm": ("token_embd_norm",),
    "positions": ("position_embd",),
    "token_types": ("token_types",),
    "attention_norm": ("blk.{layer}.attn_norm",),
    "attention.q": ("blk.{layer}.attn_q",),
    "attention.k": ("blk.{layer}.attn_k",),
    "attention.v": ("blk.{layer}.attn_v",),
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
    "attention.output": ("blk.{layer}.attn_output",),
    "attention_post_norm": ("blk.{layer}.post_attention_norm",),
    "attention_sum_norm": ("blk.{layer}.attn_output_norm",),
    "ffn_norm": ("blk.{layer}.ffn_norm",),
    "ffn.gate": ("blk.{layer}.ffn_gate",),
    "ffn.up": ("blk.{layer}.ffn_up",),
    "ffn.down": ("blk.{layer}.ffn_down",),
    "ffn.router": ("blk.{layer}.ffn_gate_inp",),
    "ffn.router.correction_bias": ("blk.{layer}.exp_probs_b.bias", "blk.{layer}.exp_probs_b"),
    "ffn.experts.gate": ("blk.{layer}.ffn_gate.{expert}",),
    "ffn.experts.up": ("blk.{layer}.ffn_up.{expert}",),
    "ffn.experts.down": ("blk.{layer}.ffn_down.{expert}",),
    "ffn.shared.gate": ("blk.{layer}.ffn_gate_shexp",),
    "ffn.shared.up": ("blk.{layer}.ffn_up_shexp",),
    "ffn.shared.down": ("blk.{layer}.ffn_down_shexp",),
    "ffn.shared_gate": ("blk.{layer}.ffn_gate_inp_shexp",),
    "ffn_post_norm": ("blk.{layer}.post_ffw_norm",),
    "ffn_sum_norm": ("blk.{layer}.layer_output_norm",),
    "final_norm": ("output_norm",),
    "lm_head": ("output",),
}
"""Module names of each role, preferred name first; the router's bias is a tensor name."""

STACKED = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
"""Tensors that stack the matrices of all experts; early MoE files have a tensor for each expert."""


def gguf_tensors(spec: ModelSpec, file: GgufFile) -> dict[str, Tensor]:
    """Returns the tensor of the file for each role of `spec`."""
    modules: dict[str, str | Fused] = {role: _present(names, file) for role, names in NAMES.items()}
    for mixer in (block.mixer for layer in spec.layers for block in layer.blocks):
        match mixer:
            case Attention(heads=heads, projections=HeadProjections() as projections):
                if "attn_qkv.weight" in file.in_layers:
                    keys, values = (projections.kv_heads * dim for dim in (projections.key_dim, projections.value_dim))
                    rows = {"attention.q": heads * projections.key_dim, "attention.k": keys, "attention.v": values}
                    modules |= fused("blk.{layer}.attn_qkv", rows)
            case Dense(gated=True, intermediate_size=width) if "ffn_gate.weight" not in file.in_layers:
                modules |= fused("blk.{layer}.ffn_up", {"ffn.gate": width, "ffn.up": width})
            case Experts(experts=experts):
                modules |= _stacks(mixer, experts, file)
            case _:
                pass
    has_post_norm = any(block.post_norm is not None for layer in spec.layers for block in layer.blocks)
    if not has_post_norm and "ffn_norm.weight" not in file.in_layers:
        # Some files name the norm before the feed-forward network as the norm after attention.
        modules["ffn_norm"] = _present(("blk.{layer}.post_attention_norm", "blk.{layer}.ffn_norm"), file)
    if "attn_norm_2.weight" in file.in_layers:
        # In Falcon's large models the first norm belongs to the feed-forward network.
        modules |= {"attention_norm": "blk.{layer}.attn_norm_2", "ffn_norm": "blk.{layer}.attn_norm"}
    return tensors_named(spec, modules)


def splits_latents(spec: ModelSpec, file: GgufFile) -> bool:
    """Whether the key and value projections from the latent are separate tensors, as in newer files."""
    attentions = (attention for layer in spec.layers for attention in layer.mixers(Attention))
    latent = any(isinstance(attention.projections, LatentProjections) for attention in attentions)
    return latent and "attn_k_b.weight" in file.in_layers


def _stacks(ffn: Experts, experts: int, file: GgufFile) -> dict[str, Fused]:
    entries: dict[str, Fused] = {}
    for role, name in STACKED.items():
        if f"{name}.weight" in file.in_layers:
            entries |= fused(f"blk.{{layer}}.{name}", f"ffn.experts.{role}", stack=experts)
    if "ffn_gate_up_exps.weight" in file.in_layers:
        width = ffn.expert.intermediate_size
        rows = {"ffn.experts.gate": width, "ffn.experts.up": width}
        entries |= fused("blk.{layer}.ffn_gate_up_exps", rows, stack=experts)
    return entries


def _present(names: tuple[str, ...], file: GgufFile) -> str:
    """Returns the first name for which the layers have a tensor, with or without `.weight`."""
    for name in names:
        last = name.removeprefix("blk.{layer}.")
        if last in file.in_layers or f"{last}.weight" in file.in_layers:
            return name
    return names[0]
