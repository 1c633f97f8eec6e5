"""Configuration of a model, from the files of a directory or the metadata of a GGUF file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ferrule._loading.gguf import GgufFile, GgufForm, end_tokens, gguf_pooling, gguf_spec, is_gguf
from ferrule._loading.quantized import read_stored_as
from ferrule._loading.sentence_files import SentenceFiles, read_sentence_files
from ferrule._params.sampling import STANDARD, SamplingParams
from ferrule.archs import model_spec
from ferrule.archs.classifier import label_names
from ferrule.archs.config import Config
from ferrule.archs.spec import DynamicScaling, ModelSpec
from ferrule.archs.vision import VisionSpec, vision_spec
from ferrule.errors import ConfigError, InvalidParameterError, ModelNotFoundError

WEIGHTS = "model.safetensors"
"""File name of unsharded weights."""
PACKED_METHOD = "ferrule"
"""Value of `quantization_config.quant_method` in config.json for weights packed by ferrule."""
GGUF_FORM = "gguf"
"""Field of `quantization_config` with the form of packed weights that come from a GGUF file."""

GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Metadata keys of recommended sampling parameters."""

GENERATION_NAMES = {name: "max_new_tokens" if name == "max_tokens" else name for name in STANDARD}
"""Fields of generation_config.json by their names in SamplingParams."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's configuration, without its weights and tokenizer."""

    path: Path
    """Model directory or GGUF file."""
    spec: ModelSpec
    defaults: SamplingParams
    """Sampling parameters that the model recommends; other fields are None."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end the model's output."""
    labels: tuple[str, ...]
    """Labels of the classifier; empty for a model without a classifier."""
    exclusive: bool
    """Whether the labels are mutually exclusive."""
    sentence: SentenceFiles
    """Settings of text embeddings."""
    vision: VisionSpec | None = None
    """Part of the model that reads images; None for a model that reads text only, and for packed weights."""
    packed: str | None = None
    """Quantization of packed weights; None for weights in the checkpoint's format."""

    @property
    def weights(self) -> Path:
        """Path that the engine reads: the directory, the GGUF file, or the directory's packed file."""
        return self.path if self.packed is None else self.path / WEIGHTS

    @cached_property
    def spec_json(self) -> str:
        """The spec as JSON, kept because a load passes it to the native module several times."""
        return self.spec.to_json()

    def extended(self, max_model_len: int | None) -> Self:
        """Returns the configuration with the context extended to `max_model_len`, if all RoPE scaling is dynamic.

        As in transformers, dynamic scaling is defined for any length. A RuntimeWarning is issued beyond the scaled
        length of the checkpoint, for which it was not tested.
        """
        context = self.spec.max_position_embeddings
        dynamic = self.spec.ropes and all(isinstance(rope.scaling, DynamicScaling) for rope in self.spec.ropes)
        if max_model_len is None or max_model_len <= context or not dynamic:
            return self
        message = (
            f"max_model_len ({max_model_len}) exceeds the model's scaled context of {context} tokens; dynamic RoPE "
            "scaling extends it, with lower quality"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return replace(self, spec=replace(self.spec, max_position_embeddings=max_model_len))


def read_model_files(path: Path) -> ModelFiles:
    """Reads a model's configuration from a directory or a GGUF file.

    Raises ModelNotFoundError if config.json is missing, ConfigError, UnsupportedModelError, ModelFileError.
    """
    return _read_gguf(path) if is_gguf(path) else _read_directory(path)


def _read_directory(directory: Path) -> ModelFiles:
    try:
        config = Config.read(directory / "config.json")
    except ModelNotFoundError:
        raise ModelNotFoundError(
            f"{directory}: config.json is missing; give a directory with a Hugging Face model, or a GGUF file"
        ) from None
    packed, form, config = _packed_as(config)
    spec = replace(model_spec(config), stored_as=read_stored_as(config, directory))
    vision = None if packed is not None else vision_spec(config)
    if form is not None:
        spec = form.applied(spec)
    sentence, spec = read_sentence_files(directory, spec)
    if "text_config" in config and "eos_token_id" not in config:
        config = config.inner("text_config")
    generation = Config.read_optional(directory / "generation_config.json")
    eos = generation if "eos_token_id" in generation else config
    return ModelFiles(
        path=directory,
        spec=spec,
        defaults=_sampling_defaults(generation),
        eos_token_ids=tuple(eos.token_ids("eos_token_id", spec.vocab_size)),
        labels=() if spec.classifier is None else label_names(config),
        exclusive=config.text("problem_type", default="") != "multi_label_classification",
        sentence=sentence,
        vision=vision,
        packed=packed,
    )


def _packed_as(config: Config) -> tuple[str | None, GgufForm | None, Config]:
    """Returns the quantization that `ferrule quantize` wrote, and the form and configuration of its source model.

    The form is None unless the source is a GGUF file.
    """
    if "quantization_config" not in config:
        return None, None, config
    said = config.inner("quantization_config")
    if said.values.get("quant_method") != PACKED_METHOD:
        return None, None, config
    form = GgufForm.read(said.inner(GGUF_FORM)) if GGUF_FORM in said else None
    return said.text("format"), form, config.without("quantization_config")


def _read_gguf(path: Path) -> ModelFiles:
    file = GgufFile(path)
    spec = gguf_spec(file)
    pooling = gguf_pooling(file)
    usual = "last" if spec.causal else "mean"
    return ModelFiles(
        path=path,
        spec=spec,
        defaults=_sampling_params(file.metadata, GGUF_SAMPLING),
        eos_token_ids=end_tokens(file.metadata, spec.vocab_size),
        labels=(),
        exclusive=True,
        sentence=SentenceFiles(pooling=pooling or usual, normalize=True, embeds=pooling is not None),
    )


def has_weights(directory: Path) -> bool:
    """Whether all weight files of a model exist; their contents are not checked."""
    if is_gguf(directory):
        return True
    files = safetensors_files(directory)
    return bool(files) and all(file.exists() for file in files)


def safetensors_files(directory: Path) -> list[Path]:
    """Returns the weight files of a model: the only one, or those that its index names. Others are ignored."""
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return []
    shards = Config.read(index).inner("weight_map").values.values()
    return [directory / shard for shard in sorted({str(shard) for shard in shards})]


def _sampling_defaults(generation: Config) -> SamplingParams:
    """Returns the sampling fields of generation_config.json; `do_sample: false` means greedy sampling."""
    greedy = "do_sample" in generation and not generation.flag("do_sample", default=True)
    return _sampling_params(generation, GENERATION_NAMES, {"temperature": 0.0} if greedy else {})


def _sampling_params(
    config: Config, names: Mapping[str, str], others: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Returns sampling parameters with the fields that a file sets under its own `names`; `others` take precedence."""
    given = {name: config.values[theirs] for name, theirs in names.items() if theirs in config}
    if isinstance(top_k := given.get("top_k"), float) and top_k.is_integer():
        given["top_k"] = int(top_k)
    try:
        return SamplingParams.with_model_defaults(**{**given, **(others or {})})
    except InvalidParameterError as error:
        raise ConfigError(f"{config.file}: {error}") from None
