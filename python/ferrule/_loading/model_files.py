"""What the small files of a model's directory say, or a GGUF's metadata: its spec, and how its authors would sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ferrule._loading.gguf import GgufFile, end_tokens, gguf_pooling, gguf_spec, is_gguf
from ferrule._loading.quantized import read_stored_as
from ferrule._loading.sentence_files import SentenceFiles, read_sentence_files
from ferrule._params.sampling import STANDARD, SamplingParams
from ferrule.archs import model_spec
from ferrule.archs.classifier import label_names
from ferrule.archs.config import Config
from ferrule.archs.spec import ModelSpec
from ferrule.errors import ConfigError, InvalidParameterError, ModelNotFoundError

WEIGHTS = "model.safetensors"
"""A model's weights, where they are in one file."""
PACKED_METHOD = "ferrule"
"""The `quant_method` of `quantization_config` in config.json where that file holds weights packed by ferrule."""

GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""What a GGUF calls what its authors recommend."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's files, read but for its weights and its tokenizer."""

    path: Path
    """A directory, or a GGUF file."""
    spec: ModelSpec
    defaults: SamplingParams
    """What the model's authors recommend; None in fields that they leave open."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end the model's output."""
    labels: tuple[str, ...]
    """Of the classifier; none where there is none."""
    exclusive: bool
    """Whether exactly one of the labels is right."""
    sentence: SentenceFiles
    """What its embeddings are made of."""
    packed: str | None = None
    """The quantization as which the weights are packed; None where they are as their authors stored them."""

    @property
    def weights(self) -> Path:
        """What an engine reads: the directory or the GGUF file, or the directory's packed file."""
        return self.path if self.packed is None else self.path / WEIGHTS


def read_model_files(path: Path) -> ModelFiles:
    """Reads a model's configuration, out of a directory or a GGUF file.

    Raises ModelNotFoundError where there is no config.json, ConfigError, UnsupportedModelError, ModelFileError.
    """
    return _read_gguf(path) if is_gguf(path) else _read_directory(path)


def _read_directory(directory: Path) -> ModelFiles:
    try:
        config = Config.read(directory / "config.json")
    except ModelNotFoundError:
        raise ModelNotFoundError(f"{directory}: has no config.json, so it is no Hugging Face model directory") from None
    packed, config = _packed_as(config)
    spec = replace(model_spec(config), stored_as=read_stored_as(config, directory))
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
        packed=packed,
    )


def _packed_as(config: Config) -> tuple[str | None, Config]:
    """What `ferrule quantize` says of the weights, and the configuration of the model that it was given."""
    if "quantization_config" not in config:
        return None, config
    said = config.inner("quantization_config")
    if said.values.get("quant_method") != PACKED_METHOD:
        return None, config
    return said.text("format"), config.without("quantization_config")


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
    """Whether the files of a model's weights are all there; says nothing of what they hold."""
    if is_gguf(directory) or (directory / WEIGHTS).exists():
        return True
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return False
    shards = Config.read(index).inner("weight_map").values.values()
    return all((directory / str(shard)).exists() for shard in set(shards))


def _sampling_defaults(generation: Config) -> SamplingParams:
    """The sampling fields that generation_config.json sets; `do_sample: false` means greedy, whatever they are."""
    # Its names are those of SamplingParams but for one.
    names = {name: "max_new_tokens" if name == "max_tokens" else name for name in STANDARD}
    greedy = "do_sample" in generation and not generation.flag("do_sample", default=True)
    return _sampling_params(generation, names, {"temperature": 0.0} if greedy else {})


def _sampling_params(
    config: Config, names: Mapping[str, str], others: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The fields of SamplingParams that a file sets under its own `names`, and others in their place."""
    given = {name: config.values[theirs] for name, theirs in names.items() if theirs in config}
    if isinstance(top_k := given.get("top_k"), float) and top_k.is_integer():
        given["top_k"] = int(top_k)
    try:
        return SamplingParams(**{**given, **(others or {})})
    except InvalidParameterError as error:
        raise ConfigError(f"{config.file}: {error}") from None
