"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts whose weights sum to 1."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Experts, ModelSpec, Router


def mixtral(config: Config) -> ModelSpec:
    """All layers share one window, if any."""
    config = config.spelled(num_local_experts="num_experts").with_absent(num_key_value_heads=8)
    config = config.with_defaults(max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=1e6)
    block = "model.layers.{layer}.block_sparse_moe"
    return decoder(
        config,
        windows=[config.integer_or_none("sliding_window")] * config.layers,
        ffn=Experts(
            experts=config.experts("num_local_experts", default=8),
            experts_per_token=config.integer("num_experts_per_tok", default=2),
            expert=Dense(config.integer("intermediate_size"), config.activation),
            router=Router(normalize=True),
        ),
        modules={
            "ffn.router": f"{block}.gate",
            "ffn.experts.gate": f"{block}.experts.{{expert}}.w1",
            "ffn.experts.up": f"{block}.experts.{{expert}}.w3",
            "ffn.experts.down": f"{block}.experts.{{expert}}.w2",
        },
    )
