"""Text decoders of multimodal models: `text_config` describes them, and their tensors have longer names."""

from pathlib import Path

from checkpoint import Edit, EditTensors, JsonObject, Tensors
from dense import old_gemma3
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
    SiglipVisionConfig,
)
from variants import SLIDING_WINDOW, Variant, make_variant, rope, sizes

VISION: JsonObject = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


TEXT, HEAD = "language_model.model.", "language_model.lm_head."

IMAGE, OTHER = 3, 4
"""Token ids that no text contains."""


def wrapped(config: PreTrainedConfig, edit: Edit | None = None, edit_tensors: EditTensors | None = None) -> Variant:
    """Returns a case in which only the text model runs, without an image."""
    return Variant(config, edit=edit, edit_tensors=edit_tensors, model_class=AutoModelForImageTextToText)


def keep_differences(text: JsonObject, defaults: PreTrainedConfig) -> None:
    """Omits fields equal to the defaults of the configuration class, as published files do."""
    said = defaults.to_dict()
    for field in [field for field in text if field in said and said[field] == text[field] and field != "model_type"]:
        del text[field]


def published_gemma3(config: JsonObject) -> None:
    """Omits the number of heads and the query scale, as google/gemma-3-4b-it does."""
    text: JsonObject = config["text_config"]
    old_gemma3(text)
    del text["rope_local_base_freq"]
    keep_differences(text, Gemma3TextConfig())


def published_llava(config: JsonObject) -> None:
    """Converts the fields to those of llava-hf/llava-1.5-7b-hf, whose text configuration has few fields."""
    text: JsonObject = config["text_config"]
    del text["rope_parameters"], text["head_dim"]
    keep_differences(text, LlamaConfig())


def later_names(tensors: Tensors) -> Tensors:
    """Names of fine-tuned models saved by transformers 4.52 and later: all except lm_head are in `model`."""

    def renamed(name: str) -> str:
        if name.startswith(HEAD):
            return "lm_head." + name.removeprefix(HEAD)
        return "model." + (name.replace(TEXT, "language_model.") if name.startswith(TEXT) else name)

    return {renamed(name): value for name, value in tensors.items()}


CASES: dict[str, Variant] = {
    "gemma3_vision": wrapped(
        Gemma3Config(
            text_config=Gemma3TextConfig(
                **sizes(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=3),
                head_dim=16,
                sliding_window=SLIDING_WINDOW,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                rope_parameters={
                    "full_attention": rope("linear", 1e6, factor=8.0),
                    "sliding_attention": rope("default"),
                },
            ),
            vision_config=SiglipVisionConfig(**VISION),
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=OTHER,
            eoi_token_index=OTHER,
        ),
        published_gemma3,
    ),
    "llava": wrapped(
        LlavaConfig(
            text_config=LlamaConfig(**sizes(num_key_value_heads=4)),
            vision_config=CLIPVisionConfig(**VISION, projection_dim=32),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        published_llava,
    ),
    # mistralai/Mistral-Small-3.1-24B-Instruct-2503.
    "mistral3": wrapped(
        Mistral3Config(
            text_config=MistralConfig(
                **sizes(), head_dim=24, sliding_window=None, rope_parameters=rope("default", 1e9)
            ),
            vision_config=PixtralVisionConfig(**VISION, head_dim=16),
            image_token_index=IMAGE,
            tie_word_embeddings=False,
        ),
        edit_tensors=later_names,
    ),
}


def make(name: str, seed: int, out: Path) -> None:
    """Writes one case."""
    make_variant(CASES[name], seed, out)
