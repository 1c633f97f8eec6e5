"""Text models of multimodal checkpoints: config.json's `text_config`."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.spec import ModelSpec

TEXT_TYPES = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "got_ocr2": "qwen2",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "llama4": "llama4_text",
    "llava_onevision": "qwen2",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
"""Default `model_type` of the text model by that of the whole model; llama for others."""

TIED_BY_DEFAULT = ("got_ocr2", "internvl", "kimi_k25", "mistral3")
"""Model types with tied embeddings by default, whose published files store an lm_head nevertheless."""

TIED_INSIDE = ("llava", "qwen2_5_vl", "qwen2_vl")
"""Model types whose files may state tied embeddings in `text_config` only; for others the outer value counts."""

SIZES = {
    "apertus": (131_072, 4096, 14_336, 32, 32, None),
    "bailing_hybrid": (157_184, 2560, 6144, 42, 32, 32),
    "bamba": (128_000, 4096, 14_336, 32, 32, 8),
    "bitnet": (128_256, 2560, 6912, 30, 20, 5),
    "cohere2": (256_000, 8192, 22_528, 40, 64, None),
    "deepseek_v3": (129_280, 7168, 18_432, 61, 128, 128),
    "deepseek_v4": (129_280, 4096, None, 43, 64, 1),
    "exaone_moe": (102_400, 4096, 16_384, 32, 32, 32),
    "falcon_h1": (128_000, 4096, 14_336, 32, 32, 8),
    "falcon_mamba": (50_280, 768, None, 32, None, None),
    "gemma": (256_000, 3072, 24_576, 28, 16, 16),
    "gemma2": (256_000, 2304, 9216, 26, 8, 4),
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 4),
    "gemma3n_text": (262_400, 2048, 16_384, 35, 8, 2),
    "gemma4_text": (262_144, 2304, 9216, 30, 8, 4),
    "glm_moe_dsa": (154_880, 6144, 12_288, 78, 64, 64),
    "granite": (32_000, 4096, 11_008, 32, 32, None),
    "granite_swa": (100_352, 2560, 8192, 24, 20, 4),
    "granitemoe_swa": (32_000, 4096, 11_008, 32, 32, None),
    "granitemoehybrid": (32_000, 4096, 11_008, 32, 32, None),
    "hy_v3": (120_832, 4096, 13_312, 80, 64, 8),
    "jamba": (65_536, 4096, 14_336, 32, 32, 8),
    "kimi_linear": (163_840, 2304, 9216, 27, 32, 32),
    "lfm2": (65_536, 2560, 12_288, 32, 32, 8),
    "lfm2_moe": (65_536, 2048, 7168, 32, 32, 8),
    "lfm3": (128_000, 2048, 7680, 24, 16, 4),
    "llama": (32_000, 4096, 11_008, 32, 32, None),
    "llama4_text": (202_048, 5120, 8192, 48, 40, 8),
    "mamba": (50_280, 768, None, 32, None, None),
    "mamba2": (32_768, 4096, None, 64, None, None),
    "mimo_v2_flash": (152_576, 4096, 16_384, 48, 64, 4),
    "minimax": (32_000, 4096, 14_336, 32, 32, 8),
    "minimax_m3_vl_text": (200_064, 6144, 3072, 60, 64, 4),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 8),
    "mistral": (32_000, 4096, 14_336, 32, 32, 8),
    "mistral4": (131_072, 4096, 12_288, 36, 32, 32),
    "mixtral": (32_000, 4096, 14_336, 32, 32, 8),
    "nemotron_h": (131_072, 4096, 21_504, None, 32, 8),
    "olmo_hybrid": (100_352, 3840, 11_008, 32, 30, None),
    "phi3": (32_064, 3072, 8192, 32, 32, None),
    "phimoe": (32_064, 4096, 6400, 32, 32, 8),
    "qwen2": (151_936, 4096, 22_016, 32, 32, 32),
    "qwen2_5_vl_text": (152_064, 8192, 29_568, 80, 64, 8),
    "qwen2_moe": (151_936, 2048, 5632, 24, 16, 16),
    "qwen2_vl_text": (152_064, 8192, 29_568, 80, 64, 8),
    "qwen3": (151_936, 4096, 22_016, 32, 32, 32),
    "qwen3_5_moe_text": (248_320, 2048, None, 40, 16, 2),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16, 4),
    "qwen3_moe": (151_936, 2048, 6144, 24, 32, 4),
    "qwen3_next": (151_936, 2048, 5632, 48, 16, 2),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 16),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 32),
    "qwen4_exp_text": (248_320, 2048, None, 40, 16, 2),
    "recurrent_gemma": (256_000, 2560, 7680, 26, 10, None),
    "rwkv": (50_277, 4096, None, 32, None, None),
    "smollm3": (128_256, 2048, 11_008, 36, 16, 4),
    "zamba2": (32_000, 2560, None, 54, 32, None),
}
"""Default sizes by `model_type`, for `text_config`: transformers 4 writes only values that differ from them."""

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
    if "model_type" in half:
        half = half.without("architectures")
    else:
        half = half.with_defaults(model_type=TEXT_TYPES.get(str(config.values.get("model_type")), "llama"))
    inside = config.values.get("model_type") in TIED_INSIDE and half.flag("tie_word_embeddings", default=False)
    if "tie_word_embeddings" in config and not inside:
        tied = config.flag("tie_word_embeddings", default=False)
        half = half.without("tie_word_embeddings").with_defaults(tie_word_embeddings=tied)
    sizes = zip(_FIELDS, SIZES.get(half.text("model_type"), ()), strict=False)
    return half.with_absent(**{field: size for field, size in sizes if size is not None})


def with_embedding_as_lm_head(config: Config, spec: ModelSpec) -> ModelSpec:
    """Returns the spec of a text model whose lm_head is the embedding unless the checkpoint stores one.

    `config` is that of the whole model; only the types in TIED_BY_DEFAULT are changed, if they do not say otherwise.
    """
    stated = "tie_word_embeddings" in config or config.values.get("model_type") not in TIED_BY_DEFAULT
    if stated or spec.lm_head is None or spec.lm_head.tied:
        return spec
    stored = replace(
        spec.tensors["lm_head.weight"], alternative=replace(spec.tensors["embedding.weight"], alternative=None)
    )
    return replace(spec, tensors={**spec.tensors, "lm_head.weight": stored})
