"""FlexOlmo (Shi et al. 2025): OLMo 2 with experts that were trained separately."""

from ferrule.archs.config import Config
from ferrule.archs.olmo2 import olmo2
from ferrule.archs.spec import Dense, Experts, ModelSpec, Router


def flex_olmo(config: Config) -> ModelSpec:
    """All layers have experts."""
    config = config.spelled(num_experts="num_local_experts")
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=5e5)
    experts = Experts(
        experts=config.experts("num_experts", default=7),
        experts_per_token=config.integer("num_experts_per_tok", default=5),
        expert=Dense(config.integer("intermediate_size"), config.activation),
        router=Router(normalize=config.flag("norm_topk_prob", default=False)),
    )
    return olmo2(config, ffn=experts)
