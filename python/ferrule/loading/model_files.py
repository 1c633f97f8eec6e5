"""What the small files of a model's directory say: config.json, generation_config.json, tokenizer_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ferrule.archs import model_spec
from ferrule.archs.classifier import label_names
from ferrule.archs.config import Config
from ferrule.errors import ConfigError, InvalidParameterError, ModelNotFoundError
from ferrule.loading.sentence_files import SentenceFiles, read_sentence_files
from ferrule.params import STANDARD, SamplingParams
from ferrule.spec import ModelSpec

WEIGHTS = "model.safetensors"
"""A model's weights, where they are in one file."""
PACKED_METHOD = "ferrule"
"""The `quant_method` of `quantization_config` in config.json where that file holds weights packed by ferrule."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's directory, read but for its weights and its tokenizer."""

    directory: Path
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
        """What an engine reads: the directory, or its packed file."""
        return self.directory if self.packed is None else self.directory / WEIGHTS


def read_model_files(directory: Path) -> ModelFiles:
    """Reads a model's configuration.

    Raises ModelNotFoundError where there is no config.json, ConfigError, UnsupportedModelError, ModelFileError.
    """
    try:
        config = Config.read(directory / "config.json")
    except ModelNotFoundError:
        raise ModelNotFoundError(f"{directory}: has no config.json, so it is no Hugging Face model directory") from None
    packed, config = _packed_as(config)
    sentence, spec = read_sentence_files(directory, model_spec(config))
    if "text_config" in config and "eos_token_id" not in config:
        config = config.inner("text_config")
    generation = Config.read_optional(directory / "generation_config.json")
    eos = generation if "eos_token_id" in generation else config
    return ModelFiles(
        directory=directory,
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


def has_weights(directory: Path) -> bool:
    """Whether the files of a model's weights are all there; says nothing of what they hold."""
    if (directory / WEIGHTS).exists():
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
    given = {name: generation.values[theirs] for name, theirs in names.items() if theirs in generation}
    if isinstance(top_k := given.get("top_k"), float) and top_k.is_integer():
        given["top_k"] = int(top_k)
    if "do_sample" in generation and not generation.flag("do_sample", default=True):
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except InvalidParameterError as error:
        raise ConfigError(f"{generation.file}: {error}") from None
