"""LFM2-MoE (Liquid AI 2025): LFM2 with experts after the first layers."""

from ferrule.archs.config import Config
from ferrule.archs.lfm2 import lfm2_decoder
from ferrule.archs.spec import Dense, Experts, ModelSpec, Router


def lfm2_moe(config: Config) -> ModelSpec:
    """The router has sigmoid scores and a bias that only takes part in the choice."""
    block = "model.layers.{layer}.feed_forward"
    experts = Experts(
        experts=config.experts("num_experts", default=32),
        experts_per_token=config.integer("num_experts_per_tok", default=4),
        expert=Dense(config.integer("moe_intermediate_size", default=1792)),
        router=Router(
            scoring="sigmoid",
            normalize=config.flag("norm_topk_prob", default=True),
            scale=config.number("routed_scaling_factor", default=1.0),
            correction_bias=config.flag("use_expert_bias", default=True),
        ),
    )
    dense = min(config.integer("num_dense_layers", default=2, low=0), config.layers)
    network = Dense(config.integer("intermediate_size", default=7168))
    return lfm2_decoder(
        config,
        ffn=[*[network] * dense, *[experts] * (config.layers - dense)],
        modules={
            "ffn.router": f"{block}.gate",
            "ffn.router.correction_bias": f"{block}.expert_bias",
            "ffn.experts.gate": f"{block}.experts.{{expert}}.w1",
            "ffn.experts.up": f"{block}.experts.{{expert}}.w3",
            "ffn.experts.down": f"{block}.experts.{{expert}}.w2",
        },
    )
