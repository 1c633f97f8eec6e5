"""Text models of multimodal checkpoints: config.json's `text_config`."""

from ferrule.archs.config import Config

TIED_INSIDE = ("llava", "qwen2_5_vl", "qwen2_vl")
"""Model types whose files may state tied embeddings in `text_config` only; for others the outer value counts."""

SIZES = {
    "cohere2": (256_000, 8192, 22_528, 40, 64, None),
    "gemma": (256_000, 3072, 24_576, 28, 16, 16),
    "gemma2": (256_000, 2304, 9216, 26, 8, 4),
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 4),
    "gemma3n_text": (262_400, 2048, 16_384, 35, 8, 2),
    "gemma4_text": (262_144, 2304, 9216, 30, 8, 4),
    "granite": (32_000, 4096, 11_008, 32, 32, None),
    "lfm2": (65_536, 2560, 12_288, 32, 32, 8),
    "lfm3": (128_000, 2048, 7680, 24, 16, 4),
    "llama": (32_000, 4096, 11_008, 32, 32, None),
    "llama4_text": (202_048, 5120, 8192, 48, 40, 8),
    "minimax_m3_vl_text": (200_064, 6144, 3072, 60, 64, 4),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 8),
    "mistral": (32_000, 4096, 14_336, 32, 32, 8),
    "qwen2": (151_936, 4096, 22_016, 32, 32, 32),
    "qwen2_5_vl_text": (152_064, 8192, 29_568, 80, 64, 8),
    "qwen2_vl_text": (152_064, 8192, 29_568, 80, 64, 8),
    "qwen3": (151_936, 4096, 22_016, 32, 32, 32),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 16),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 32),
}
"""Default sizes by `model_type`: transformers writes only differing values into `text_config`."""

_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def text_config(config: Config) -> Config:
    """Returns the complete configuration of the text model.

    Raises UnsupportedModelError for a model whose text model does not run alone.
    """
    if config.values.get("model_type") == "paligemma":
        raise config.unsupported("model_type", "the type of a model with causal attention over the prompt")
    half = config.inner("text_config")
    # `architectures` in there may name the class of the whole model.
    half = half.without("architectures") if "model_type" in half else half.with_defaults(model_type="llama")
    inside = config.values.get("model_type") in TIED_INSIDE and half.flag("tie_word_embeddings", default=False)
    if "tie_word_embeddings" in config and not inside:
        tied = config.flag("tie_word_embeddings", default=False)
        half = half.without("tie_word_embeddings").with_defaults(tie_word_embeddings=tied)
    sizes = SIZES.get(half.text("model_type"), ())
    return half.with_absent(**dict(zip(_FIELDS, sizes, strict=False)))
