"""Bailing hybrid (Ling 3, inclusionAI 2026): Kimi delta attention with bounded decay, and gated latent attention."""

from ferrule.archs.config import Config
from ferrule.archs.experts import (
    corrected_router,
    experts_after_dense,
    experts_by_layer_type,
    routed_experts,
)
from ferrule.archs.kimi_linear import delta_modules, experts_spelled
from ferrule.archs.latent import latent_decoder
from ferrule.archs.qwen3_next import attending_layers
from ferrule.archs.spec import Decay, DeltaNet, LmHead, ModelSpec, RmsNorm

_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.attention"

MODULES = {
    "embedding": "model.word_embeddings",
    "attention.q": f"{_ATTENTION}.q_proj",
    "attention.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
    "attention.kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
    "attention.kv_b": f"{_ATTENTION}.kv_b_proj",
    "attention.gate": f"{_ATTENTION}.g_proj",
    "attention.output": f"{_ATTENTION}.dense",
    "delta_net.decay": f"{_ATTENTION}.f_proj",
    "delta_net.gate": f"{_ATTENTION}.g_proj",
    "delta_net.output": f"{_ATTENTION}.dense",
    "ffn.router.correction_bias": f"{_LAYER}.mlp.gate.expert_bias",
}
"""Module names in which Bailing's checkpoints differ from DeepSeek's."""


def bailing_hybrid(config: Config) -> ModelSpec:
    """The lm_head is stored, whatever `tie_word_embeddings` says; multi-token prediction layers are ignored."""
    config = experts_spelled(config).with_defaults(
        first_k_dense_replace=2,
        max_position_embeddings=262_144,
        moe_intermediate_size=768,
        n_routed_experts=512,
        rms_norm_eps=1e-6,
        rope_theta=6e6,
    )
    config.require(
        gated_attention_proj_granularity_type="head_wise",
        q_lora_rank=None,
        no_kda_lora=True,
        linear_attention="kda",
        rope_interleave=True,
        score_function="sigmoid",
        use_bias=False,
        use_qkv_bias=False,
    )
    # The rotated elements are those of qk_rope_head_dim, whatever this factor says.
    config = config.without("partial_rotary_factor")
    if "rope_parameters" in config:
        ropes = config.inner("rope_parameters").without("partial_rotary_factor")
        config = config.with_values(rope_parameters=ropes.values)
    # transformers writes the rotated part of a head in attention as head_dim, and the heads of delta nets apart.
    heads = config.integer("linear_num_heads", default=config.heads)
    head_dim = config.integer("linear_head_dim", default=config.integer("head_dim", default=128))
    taps = config.integer("linear_conv_kernel_dim", default=config.integer("short_conv_kernel_size", default=4))
    bounded = config.flag("kda_safe_gate", default=True)
    bound = config.number("kda_lower_bound", default=-5.0, low=-float("inf")) if bounded else None
    if bound is not None and bound > 0:
        raise config.error("kda_lower_bound", "at most 0")
    mixer = DeltaNet(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=taps,
        norm=RmsNorm(config.number("rms_norm_eps")),
        activation=config.activation,
        decay=Decay(by_key=True, lower_bound=bound),
        gate="sigmoid",
    )
    experts = routed_experts(config, corrected_router(config))
    attending = attending_layers(config, interval=config.integer("layer_group_size", default=6))
    return latent_decoder(
        config,
        experts_by_layer_type(config, experts) or experts_after_dense(config, experts),
        interleaved=True,
        output_gate="heads",
        mixers={index: mixer for index in range(config.layers) if index not in attending},
        lm_head=LmHead(tied=False),
        modules={**delta_modules(_ATTENTION), **MODULES},
    )
