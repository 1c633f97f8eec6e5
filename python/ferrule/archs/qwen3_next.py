"""Qwen3-Next (Qwen Team 2025): three gated delta nets to one gated attention; experts with a shared one."""

from collections.abc import Mapping

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.experts import sparse_layers
from ferrule.archs.spec import DeltaNet, Dense, Experts, Ffn, HeadNorm, ModelSpec, RmsNorm, Router
from ferrule.archs.tensors import Fused, fused

_LAYER = "model.layers.{layer}"

MODULES = {
    "delta_net_norm": f"{_LAYER}.input_layernorm",
    "delta_net.kernel": f"{_LAYER}.linear_attn.conv1d",
    "delta_net.decay_log.weight": f"{_LAYER}.linear_attn.A_log",
    "delta_net.decay_bias.weight": f"{_LAYER}.linear_attn.dt_bias",
    "delta_net.norm": f"{_LAYER}.linear_attn.norm",
    "delta_net.output": f"{_LAYER}.linear_attn.out_proj",
    "ffn.shared.gate": f"{_LAYER}.mlp.shared_expert.gate_proj",
    "ffn.shared.up": f"{_LAYER}.mlp.shared_expert.up_proj",
    "ffn.shared.down": f"{_LAYER}.mlp.shared_expert.down_proj",
    "ffn.shared_gate": f"{_LAYER}.mlp.shared_expert_gate",
}
"""Module names of delta nets and shared experts in Qwen's checkpoints."""


def qwen3_next(config: Config) -> ModelSpec:
    """Projections of a delta net are interleaved by key head."""
    config = config.with_defaults(
        decoder_sparse_step=1,
        intermediate_size=5632,
        max_position_embeddings=32_768,
        moe_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        shared_expert_intermediate_size=512,
    ).with_absent(num_key_value_heads=2)
    delta_net = read_delta_net(config)
    values = delta_net.value_heads // delta_net.key_heads
    group = {
        "delta_net.q": delta_net.key_dim,
        "delta_net.k": delta_net.key_dim,
        "delta_net.v": values * delta_net.value_dim,
        "delta_net.gate": values * delta_net.value_dim,
    }
    ffn: Dense | list[Ffn] = Dense(config.integer("intermediate_size"), config.activation)
    if config.integer("num_experts", low=0):
        experts = shared_experts(config, normalize=config.flag("norm_topk_prob", default=True))
        ffn = sparse_layers(config, experts)
    modules = {
        **fused(f"{_LAYER}.linear_attn.in_proj_qkvz", group),
        **fused(f"{_LAYER}.linear_attn.in_proj_ba", {"delta_net.factor": values, "delta_net.decay": values}),
    }
    return gated_decoder(config, delta_net, ffn, modules, interval=config.integer("full_attention_interval", default=4))


def read_delta_net(config: Config) -> DeltaNet:
    """Returns the gated delta net that the fields `linear_*` describe."""
    key_heads = config.integer("linear_num_key_heads", default=16)
    value_heads = config.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    return DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim", default=128),
        value_dim=config.integer("linear_value_head_dim", default=128),
        taps=config.integer("linear_conv_kernel_dim", default=4),
        norm=RmsNorm(config.number("rms_norm_eps", default=1e-6)),
        activation=config.activation,
    )


def shared_experts(config: Config, *, normalize: bool) -> Experts:
    """Returns experts with one that runs for every token, behind a gate."""
    return Experts(
        experts=config.experts("num_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert=Dense(config.integer("moe_intermediate_size"), config.activation),
        router=Router(normalize=normalize),
        shared=Dense(config.integer("shared_expert_intermediate_size"), config.activation),
        shared_gate=True,
    )


def gated_decoder(
    config: Config,
    delta_net: DeltaNet,
    ffn: Ffn | list[Ffn],
    modules: Mapping[str, str | Fused],
    *,
    interval: int,
    partial_rotary: float = 0.25,
) -> ModelSpec:
    """Returns the spec of a decoder of delta nets and gated attention; every `interval`-th layer attends by default.

    `partial_rotary` is the default of `partial_rotary_factor`.
    """
    config = config.with_defaults(head_dim=256)
    bias = config.flag("attention_bias", default=False)
    norm = RmsNorm(config.number("rms_norm_eps", default=1e-6), weight_offset=1.0)
    attending = attending_layers(config, interval=interval)
    return decoder(
        config,
        norm=norm,
        partial_rotary=partial_rotary,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(norm),
        output_gate="elements",
        gate_bias=bias,
        mixers={index: delta_net for index in range(config.layers) if index not in attending},
        ffn=ffn,
        modules={
            **MODULES,
            **fused(f"{_LAYER}.self_attn.q_proj", {"attention.q": config.head_dim, "attention.gate": config.head_dim}),
            **modules,
        },
    )


def attending_layers(config: Config, *, interval: int) -> list[int]:
    """Returns the layers with attention, from `layer_types` or, in old files, every `interval`-th."""
    types = config.layer_kinds("layer_types", "linear_attention", "full_attention")
    if not types:
        return list(range(interval - 1, config.layers, interval))
    return [index for index, kind in enumerate(types) if kind == "full_attention"]
