"""dots.llm1 (rednote-hilab 2025): Qwen3's attention and DeepSeek-V3's experts."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.experts import EXPERT_MODULES, corrected_router, experts_after_dense, routed_experts
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm


def dots1(config: Config) -> ModelSpec:
    """Layers from `max_window_layers` on have windows; no published model has that many layers."""
    config = config.with_defaults(
        max_position_embeddings=2048,
        first_k_dense_replace=0,
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
    ).with_absent(num_key_value_heads=32, sliding_window=4096)
    window = config.integer_or_none("sliding_window")
    first = config.integer("max_window_layers", default=62, low=0)
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        windows=layer_windows(config, sliding=lambda index: window is not None and index >= first, window=window),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps", default=1e-6))),
        ffn=experts_after_dense(config, routed_experts(config, corrected_router(config))),
        modules=EXPERT_MODULES,
    )
