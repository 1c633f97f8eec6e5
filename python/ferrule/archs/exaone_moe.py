"""K-EXAONE (LG AI Research 2025): EXAONE's windows and rotation, norms before the blocks, DeepSeek-V3's mixtures."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.exaone4 import exaone_defaults, exaone_rotated, exaone_windows
from ferrule.archs.mixtures import MIXTURE_MODULES, corrected_router, listed_mixtures, mixture, mixtures_after_dense
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm


def exaone_moe(config: Config) -> ModelSpec:
    """The layers that predict further tokens are left aside."""
    config = exaone_defaults(config.spelled(n_routed_experts="num_experts", n_shared_experts="num_shared_experts"))
    config = config.with_defaults(
        first_k_dense_replace=1,
        moe_intermediate_size=1024,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
    )
    experts = mixture(config, corrected_router(config))
    windows = exaone_windows(config)
    return decoder(
        config,
        windows=windows,
        rotated=exaone_rotated(config, windows),
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps"))),
        ffn=listed_mixtures(config, experts) or mixtures_after_dense(config, experts),
        modules={
            **MIXTURE_MODULES,
            "ffn.router.correction_bias": "model.layers.{layer}.mlp.e_score_correction_bias",
        },
    )
