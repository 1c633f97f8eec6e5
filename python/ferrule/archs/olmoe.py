"""OLMoE (Muennighoff et al. 2024): a mixture of experts; query and key norms over all heads."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Experts, HeadNorm, ModelSpec, RmsNorm, Router


def olmoe(config: Config) -> ModelSpec:
    """All layers have experts."""
    config = config.spelled(num_experts="num_local_experts")
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps")), over="heads"),
        clip=config.number_or_none("clip_qkv"),
        ffn=Experts(
            experts=config.experts("num_experts", default=64),
            experts_per_token=config.integer("num_experts_per_tok", default=8),
            expert=Dense(config.integer("intermediate_size"), config.activation),
            router=Router(normalize=config.flag("norm_topk_prob", default=False)),
        ),
    )
