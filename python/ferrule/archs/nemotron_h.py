"""Nemotron-H and Nemotron 3 (NVIDIA 2025): layers of one mixer each: Mamba 2, attention, a network or experts."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.mamba2 import BACKBONE, divisor, modules, step_limits
from ferrule.archs.spec import Dense, Experts, Latent, LmHead, Mamba2, Mixer, ModelSpec, RmsNorm, Router

_LAYER = "backbone.layers.{layer}"
_KINDS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_NEW_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
_SPELLINGS = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_limit": "mamba_dt_limit",
    "use_conv_bias": "mamba_conv_bias",
}
"""Fields whose other names take precedence."""

MODULES = {
    **BACKBONE,
    **{f"{block}_norm": f"{_LAYER}.norm" for block in ("attention", "mamba2", "ffn")},
    **{f"attention.{role}": f"{_LAYER}.mixer.{role}_proj" for role in ("q", "k", "v")},
    "attention.output": f"{_LAYER}.mixer.o_proj",
    "ffn.up": f"{_LAYER}.mixer.up_proj",
    "ffn.down": f"{_LAYER}.mixer.down_proj",
    "ffn.router": f"{_LAYER}.mixer.gate",
    "ffn.router.correction_bias": f"{_LAYER}.mixer.gate.e_score_correction_bias",
    "ffn.latent_in": f"{_LAYER}.mixer.fc1_latent_proj",
    "ffn.latent_out": f"{_LAYER}.mixer.fc2_latent_proj",
    "ffn.experts.up": f"{_LAYER}.mixer.experts.{{expert}}.up_proj",
    "ffn.experts.down": f"{_LAYER}.mixer.experts.{{expert}}.down_proj",
    "ffn.shared.up": f"{_LAYER}.mixer.shared_experts.up_proj",
    "ffn.shared.down": f"{_LAYER}.mixer.shared_experts.down_proj",
}
"""Module names in Nemotron-H's checkpoints."""


def nemotron_h(config: Config) -> ModelSpec:
    """Attention has no rotary embedding, and no biases whatever `attention_bias` says.

    Networks have no gate, and the chosen experts no biases. The lm_head is stored, whatever `tie_word_embeddings` says.
    """
    given = {field: name for field, name in _SPELLINGS.items() if name in config}
    config = (
        config.without(*given)
        .spelled(n_routed_experts="num_local_experts", **given)
        .with_defaults(
            head_dim=128,
            intermediate_size=21_504,
            max_position_embeddings=4096,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            n_routed_experts=8,
            num_experts_per_tok=2,
            rms_norm_eps=config.number("layer_norm_epsilon", default=1e-5),
        )
        .with_absent(num_key_value_heads=8)
    )
    kinds = _kinds(config)
    config = config.with_values(num_hidden_layers=len(kinds))
    mixer = _mamba2(config)
    of_kind: dict[str, Mixer] = {"mamba": mixer}
    activation = config.activation_named("mlp_hidden_act", default="relu2")
    bias = config.flag("mlp_bias", default=False)
    latent = config.integer_or_none("moe_latent_size")
    if "mlp" in kinds:
        of_kind["mlp"] = Dense(config.integer("intermediate_size"), activation, gated=False, bias=bias)
    if "moe" in kinds:
        of_kind["moe"] = Experts(
            experts=config.experts("n_routed_experts"),
            experts_per_token=config.integer("num_experts_per_tok"),
            expert=Dense(config.integer("moe_intermediate_size"), activation, gated=False),
            router=Router(
                scoring="sigmoid",
                normalize=config.flag("norm_topk_prob", default=True),
                scale=config.number("routed_scaling_factor", default=1.0),
                correction_bias=True,
                groups=config.integer("n_group", default=1),
                groups_chosen=config.integer("topk_group", default=1),
            ),
            shared=Dense(config.integer("moe_shared_expert_intermediate_size"), activation, gated=False, bias=bias),
            latent=None if latent is None else Latent(latent, bias),
        )
    return decoder(
        config,
        rotated=False,
        mixers={index: of_kind[kind] for index, kind in enumerate(kinds) if kind != "attention"},
        ffn=[None] * len(kinds),
        lm_head=LmHead(tied=False),
        modules={**MODULES, **modules(f"{_LAYER}.mixer", mixer)},
    )


def _kinds(config: Config) -> list[str]:
    """Returns the kind of each layer, from `layers_block_type` or, in old files, `hybrid_override_pattern`."""
    if "layer_types" in config and "layers_block_type" not in config:
        config = config.without("layers_block_type").spelled(layers_block_type="layer_types")
    if "layers_block_type" not in config and "hybrid_override_pattern" in config:
        pattern = config.text("hybrid_override_pattern")
        if not pattern or any(letter not in _KINDS for letter in pattern):
            raise config.error("hybrid_override_pattern", f"a string of {', '.join(_KINDS)}")
        return [_KINDS[letter] for letter in pattern]
    if "layers_block_type" not in config:
        return ["mamba", "moe", "attention", "mlp"]
    kinds = [_NEW_NAMES.get(kind, kind) for kind in config.texts("layers_block_type")]
    if not kinds or any(kind not in _KINDS.values() for kind in kinds):
        raise config.error("layers_block_type", f"a list of {', '.join([*_KINDS.values(), *_NEW_NAMES])}")
    return kinds


def _mamba2(config: Config) -> Mamba2:
    bias = config.flag("use_bias", default=False)
    heads, groups = config.integer("mamba_num_heads", default=128), config.integer("n_groups", default=8)
    return Mamba2(
        heads=heads,
        head_dim=config.integer("mamba_head_dim", default=64),
        groups=divisor(config, "n_groups", groups, heads),
        state_size=config.integer("ssm_state_size", default=128),
        taps=config.integer("conv_kernel", default=4),
        bias=bias,
        output_bias=bias,
        kernel_bias=config.flag("use_conv_bias", default=True),
        activation=config.activation_named("mamba_hidden_act", default="silu"),
        norm=RmsNorm(config.number("rms_norm_eps")),
        norm_groups=groups,
        **step_limits(config),
    )
