"""MiniMax-M2 (MiniMax 2025): small experts with a correction bias; query and key norms over all heads."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Experts, HeadNorm, ModelSpec, RmsNorm, Router


def minimax_m2(config: Config) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = config.spelled(num_local_experts="num_experts").with_absent(num_key_value_heads=8)
    config = config.with_defaults(head_dim=128, max_position_embeddings=196_608, rope_theta=5e6)
    if "rotary_dim" in config:
        rotary_dim = config.integer("rotary_dim", low=2, high=config.head_dim)
        config = config.with_defaults(partial_rotary_factor=rotary_dim / config.head_dim)
    block = "model.layers.{layer}.block_sparse_moe"
    return decoder(
        config,
        partial_rotary=1.0,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps", default=1e-6)), over="heads"),
        ffn=Experts(
            experts=config.experts("num_local_experts", default=256),
            experts_per_token=config.integer("num_experts_per_tok", default=8),
            expert=Dense(config.integer("intermediate_size"), config.activation),
            router=Router(scoring="sigmoid", normalize=True, correction_bias=True),
        ),
        modules={
            "ffn.router": f"{block}.gate",
            "ffn.router.correction_bias": f"{block}.e_score_correction_bias",
            "ffn.experts.gate": f"{block}.experts.{{expert}}.w1",
            "ffn.experts.up": f"{block}.experts.{{expert}}.w3",
            "ffn.experts.down": f"{block}.experts.{{expert}}.w2",
        },
    )
