"""Kimi Linear (Kimi Team 2025): Kimi delta attention in most layers, latent attention without positions in some."""

from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.archs.experts import (
    corrected_router,
    experts_after_dense,
    experts_by_layer_type,
    routed_experts,
)
from ferrule.archs.latent import latent_decoder
from ferrule.archs.qwen3_next import attending_layers
from ferrule.archs.spec import Decay, DeltaNet, LmHead, ModelSpec, RmsNorm
from ferrule.archs.tensors import Fused, joined

_LAYER = "model.layers.{layer}"
_EXPERTS = f"{_LAYER}.block_sparse_moe"

MODULES = {
    "ffn.router": f"{_EXPERTS}.gate",
    "ffn.router.correction_bias": f"{_EXPERTS}.gate.e_score_correction_bias",
    "ffn.experts.gate": f"{_EXPERTS}.experts.{{expert}}.w1",
    "ffn.experts.up": f"{_EXPERTS}.experts.{{expert}}.w3",
    "ffn.experts.down": f"{_EXPERTS}.experts.{{expert}}.w2",
    **{f"ffn.shared.{role}": f"{_EXPERTS}.shared_experts.{role}_proj" for role in ("gate", "up", "down")},
    **{
        f"delta_net.{role}_{half}": f"{_LAYER}.self_attn.{name}_{half}_proj"
        for role, name in (("decay", "f"), ("gate", "g"))
        for half in ("a", "b")
    },
}
"""Module names of experts and low-rank projections in Kimi's checkpoints."""


def kimi_linear(config: Config) -> ModelSpec:
    """The lm_head is stored, whatever `tie_word_embeddings` says."""
    config = experts_spelled(config).with_defaults(
        first_k_dense_replace=1,
        max_position_embeddings=1 << 20,
        moe_intermediate_size=1024,
        n_group=1,
        n_routed_experts=256,
        rms_norm_eps=1e-5,
        routed_scaling_factor=2.446,
        topk_group=1,
    )
    config.require(mla_use_nope=True, moe_router_activation_func="sigmoid")
    config.require(mla_use_output_gate=False, attn_res_block_size=None, dense_ffn_hidden=None)
    linear = config.inner("linear_attn_config")
    heads = linear.integer("num_heads", default=config.integer("linear_num_heads", default=32))
    head_dim = linear.integer("head_dim", default=config.integer("linear_head_dim", default=128))
    mixer = DeltaNet(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=linear.integer("short_conv_kernel_size", default=config.integer("linear_conv_kernel_dim", default=4)),
        norm=RmsNorm(config.number("rms_norm_eps")),
        activation=config.activation,
        decay=Decay(by_key=True, rank=head_dim),
        gate="sigmoid",
        gate_rank=head_dim,
    )
    experts = routed_experts(config, corrected_router(config))
    attending = _attending_layers(config, linear)
    return latent_decoder(
        config,
        experts_by_layer_type(config, experts) or experts_after_dense(config, experts),
        rotated=False,
        mixers={index: mixer for index in range(config.layers) if index not in attending},
        lm_head=LmHead(tied=False),
        modules={
            **delta_modules(f"{_LAYER}.self_attn"),
            "delta_net.output": f"{_LAYER}.self_attn.o_proj",
            **MODULES,
        },
        # transformers 5 writes dense layers under the name of those with experts.
        alternatives={f"ffn.{role}": f"{_EXPERTS}.{role}_proj" for role in ("gate", "up", "down")},
    )


def experts_spelled(config: Config) -> Config:
    """Returns a configuration with DeepSeek's names of the experts' fields, and default values of Kimi and Bailing."""
    return (
        config.spelled(num_experts="num_local_experts")
        .spelled(
            max_position_embeddings="model_max_length",
            n_group="num_expert_group",
            n_routed_experts="num_experts",
            n_shared_experts="num_shared_experts",
            norm_topk_prob="moe_renormalize",
            num_experts_per_tok="num_experts_per_token",
        )
        .with_defaults(n_shared_experts=1, num_experts_per_tok=8)
    )


def delta_modules(at: str) -> dict[str, str | Fused]:
    """Returns the module names of a Kimi delta attention that is the module `at`, and of the norm before it."""
    return {
        "delta_net_norm": f"{_LAYER}.input_layernorm",
        **{f"delta_net.{role}": f"{at}.{role}_proj" for role in ("q", "k", "v")},
        **joined("delta_net.kernel", f"{at}.q_conv1d", f"{at}.k_conv1d", f"{at}.v_conv1d"),
        "delta_net.factor": f"{at}.b_proj",
        "delta_net.decay_log.weight": f"{at}.A_log",
        "delta_net.decay_bias.weight": f"{at}.dt_bias",
        "delta_net.norm": f"{at}.o_norm",
    }


def _attending_layers(config: Config, linear: Config) -> list[int]:
    """Returns the layers with attention, from `layer_types` or the lists of `linear_attn_config`, counted from 1."""
    layers = config.layers
    if "layer_types" in config:
        return attending_layers(config, interval=4)
    if "full_attn_layers" not in linear or "kda_layers" not in linear:
        return list(range(4, layers, 4))
    full = linear.integers("full_attn_layers", low=1, high=MAX_LAYERS)
    delta = linear.integers("kda_layers", low=1, high=MAX_LAYERS)
    if sorted(full + delta) != list(range(1, layers + 1)):
        raise linear.error("kda_layers", f"the layers from 1 to {layers} that full_attn_layers does not have")
    return [index - 1 for index in full]
