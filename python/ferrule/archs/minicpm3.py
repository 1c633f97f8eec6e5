"""MiniCPM3 (OpenBMB 2024): DeepSeek's latent attention, and multipliers on embeddings, residuals and logits."""

from ferrule.archs.config import Config
from ferrule.archs.latent import latent_decoder
from ferrule.archs.spec import Dense, Embedding, LmHead, ModelSpec


def minicpm3(config: Config) -> ModelSpec:
    """The residual scale decreases with the number of layers; null means a factor of 1."""
    config = config.with_defaults(
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        tie_word_embeddings=True,
    ).with_absent(q_lora_rank=768, num_key_value_heads=40, scale_depth=1.4, dim_model_base=256)
    hidden = config.integer("hidden_size")
    depth = config.number("scale_depth", default=config.layers**0.5)
    return latent_decoder(
        # The file's head_dim is the rotated width of a head, or is missing.
        config.with_defaults(v_head_dim=config.without("head_dim").head_dim),
        Dense(config.integer("intermediate_size"), config.activation),
        interleaved=False,
        residual_scale=depth / config.layers**0.5,
        embedding=Embedding(scale=config.number("scale_emb", default=12.0)),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=True),
            scale=config.number("dim_model_base", default=hidden) / hidden,
        ),
    )
