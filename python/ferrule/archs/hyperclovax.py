"""HyperCLOVA X (NAVER 2025): Granite's multipliers, and norms around both blocks."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Embedding, LmHead, ModelSpec


def hyperclovax(config: Config) -> ModelSpec:
    """Logits are multiplied by `logits_scaling`; Granite divides."""
    bias = config.flag("attention_bias", default=False)
    block = "model.layers.{layer}"
    return decoder(
        config.with_defaults(max_position_embeddings=2048),
        norms="around" if config.flag("use_post_norm", default=True) else "before",
        qkv_bias=bias,
        output_bias=bias,
        scale=config.number_or_none("attention_multiplier"),
        mlp_bias=config.flag("mlp_bias", default=False),
        residual_scale=config.number("residual_multiplier", default=1.0),
        embedding=Embedding(scale=config.number("embedding_multiplier", default=1.0)),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=False),
            scale=config.number("logits_scaling", default=1.0),
        ),
        modules={"attention_post_norm": f"{block}.post_norm1", "ffn_post_norm": f"{block}.post_norm2"},
    )
