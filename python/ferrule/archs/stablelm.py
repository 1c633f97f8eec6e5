"""StableLM (Bellagente et al. 2024): Llama with layer norms, a quarter of each head rotated."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import HeadNorm, LayerNorm, ModelSpec


def stablelm(config: Config) -> ModelSpec:
    """The 12B model has parallel blocks and a norm for each query and key head."""
    config = config.with_defaults(num_key_value_heads=32, max_position_embeddings=4096)
    eps = config.number("layer_norm_eps", default=1e-5)
    each_head = HeadNorm(LayerNorm(eps, bias=False), over="each_head")
    attention = "model.layers.{layer}.self_attn"
    return decoder(
        config,
        norm=LayerNorm(eps),
        parallel="one_norm" if config.flag("use_parallel_residual", default=False) else None,
        partial_rotary=0.25,
        qkv_bias=config.flag("use_qkv_bias", default=False),
        qk_norm=each_head if config.flag("qk_layernorm", default=False) else None,
        modules={
            "attention.q_norm": f"{attention}.q_layernorm.norms.{{head}}",
            "attention.k_norm": f"{attention}.k_layernorm.norms.{{head}}",
        },
    )
