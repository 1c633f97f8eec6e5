"""Configuration files of sentence-transformers: pooling, projections and prompts of embedding models.

`modules.json` lists modules, which run in order, each with a folder: `1_Pooling/config.json`, `2_Dense`, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import cast

from ferrule._validation import shown
from ferrule.archs.config import Config, read_json
from ferrule.archs.spec import Activation, ModelSpec, Pooling, TextProjection
from ferrule.archs.tensors import tensors_named
from ferrule.errors import ConfigError, UnsupportedModelError

POOLINGS: dict[str, Pooling] = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
"""Pooling modes by the suffix of the field `pooling_mode_...` in old files."""
OTHER_POOLINGS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")

ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Activations by the name of their class in PyTorch; the name of its Python module is ignored."""

MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore")
"""Supported modules. Dropout has no effect in inference."""


@dataclass(frozen=True)
class SentenceFiles:
    """Default settings of text embeddings."""

    pooling: Pooling
    normalize: bool
    embeds: bool = False
    """Whether the files declare an embedding model."""
    max_tokens: int | None = None
    """Maximum length of a text in tokens, special tokens included."""
    lower_case: bool = False
    """Whether texts are lower-cased before tokenization."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Text prefixes by name."""
    default_prompt: str | None = None
    """Name of the default prefix."""
    include_prompt: bool = True
    """Whether the prefix's tokens are pooled too."""
    judged_by: tuple[int, int] | None = None
    """Token ids of a reranker's two answers, relevant and not relevant; None for other models."""


def read_sentence_files(directory: Path, spec: ModelSpec) -> tuple[SentenceFiles, ModelSpec]:
    """Reads the files of a directory, and adds their projections to the spec.

    Without these files, embeddings are normalized to length 1, decoders pool the last token, and encoders the mean.

    Raises ConfigError, UnsupportedModelError, ModelFileError.
    """
    sentence = Config.read_optional(directory / "sentence_bert_config.json")
    texts = Config.read_optional(directory / "config_sentence_transformers.json")
    files = SentenceFiles(
        pooling="last" if spec.causal else "mean",
        normalize=True,
        max_tokens=sentence.integer_or_none("max_seq_length"),
        lower_case=sentence.flag("do_lower_case", default=False),
        prompts=_prompts(texts),
        default_prompt=texts.text("default_prompt_name") if "default_prompt_name" in texts else None,
    )
    if files.default_prompt is not None and files.default_prompt not in files.prompts:
        raise texts.error("default_prompt_name", f"a name of prompts ({', '.join(files.prompts) or 'empty'})")
    listing = directory / "modules.json"
    if not listing.exists() and not listing.is_symlink():
        return files, spec
    projections: list[tuple[str, TextProjection]] = []
    files = replace(files, normalize=False)
    for kind, folder in _modules(listing):
        if kind != "Normalize" and files.normalize:
            raise UnsupportedModelError(f"{listing}: Normalize must be the last module, got {kind} after it")
        match kind:
            case "Pooling":
                files = _with_pooling(files, _folder_config(directory, folder))
            case "Dense":
                width = projections[-1][1].width if projections else spec.hidden_size
                projections.append((folder, _projection(_folder_config(directory, folder), width)))
            case "Normalize":
                files = replace(files, normalize=True)
            case "LogitScore":
                files = replace(files, judged_by=_judged_by(_folder_config(directory, folder), spec.vocab_size))
            case _:
                pass
    if not projections:
        return files, spec
    modules = {f"text_projections.{index}": f"{folder}/linear" for index, (folder, _) in enumerate(projections)}
    spec = replace(spec, text_projections=[projection for _, projection in projections])
    return files, replace(spec, tensors=tensors_named(spec, modules, spec.tensors))


def _modules(listing: Path) -> list[tuple[str, str]]:
    """Returns the class name and the folder of each module."""
    entries = read_json(listing)
    limit = "a list of objects with type and path"
    if not isinstance(entries, list):
        raise ConfigError(f"{listing}: content must be {limit}, got {shown(entries)}")
    modules: list[tuple[str, str]] = []
    for entry in cast("list[object]", entries):
        if not isinstance(entry, dict):
            raise ConfigError(f"{listing}: content must be {limit}, got {shown(entry)}")
        module = Config(cast("dict[str, object]", entry), listing)
        kind, folder = module.text("type").rpartition(".")[2], module.text("path", default="")
        if kind not in MODULES:
            raise module.unsupported("type", f"one of {', '.join(MODULES)}")
        is_plain = PurePosixPath(folder).name == folder and "\\" not in folder and "\0" not in folder
        if folder and (not is_plain or folder == ".."):
            raise module.error("path", "the name of a directory beside modules.json")
        if kind == "Transformer" and folder:
            raise module.unsupported("path", "empty (the model's files are beside modules.json)")
        modules.append((kind, folder))
    if [kind for kind, _ in modules].count("Pooling") > 1:
        raise UnsupportedModelError(f"{listing}: must have at most one module of type Pooling, got several")
    return modules


def _folder_config(directory: Path, folder: str) -> Config:
    return Config.read(directory / folder / "config.json")


def _with_pooling(files: SentenceFiles, config: Config) -> SentenceFiles:
    if "pooling_mode" in config:
        modes = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
        mode = config.text("pooling_mode")
        if mode not in modes:
            raise config.unsupported("pooling_mode", f"one of {', '.join(modes)}")
        pooling = cast("Pooling", modes[mode])
    else:
        # The default pooling is the mean.
        names = (*POOLINGS, *OTHER_POOLINGS)
        chosen = [n for n in names if config.flag(f"pooling_mode_{n}", default=n == "mean_tokens")]
        if len(chosen) != 1 or chosen[0] not in POOLINGS:
            found = " and ".join(f"pooling_mode_{name}" for name in chosen) or "no pooling_mode"
            limit = ", ".join(f"pooling_mode_{name}" for name in POOLINGS)
            raise UnsupportedModelError(f"{config.file}: {found} is true; ferrule runs one of {limit}")
        pooling = POOLINGS[chosen[0]]
    return replace(files, pooling=pooling, embeds=True, include_prompt=config.flag("include_prompt", default=True))


def _projection(config: Config, width: int) -> TextProjection:
    if config.integer("in_features") != width:
        raise config.error("in_features", f"{width}, the output width of the previous module")
    for kept in ("module_input_name", "module_output_name"):
        config.require(**{kept: "sentence_embedding"})
    name = config.text("activation_function", default="torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise config.unsupported("activation_function", f"one of {', '.join(ACTIVATIONS)}")
    return TextProjection(config.integer("out_features"), ACTIVATIONS[name], config.flag("bias", default=True))


def _judged_by(config: Config, vocab_size: int) -> tuple[int, int]:
    yes = config.integer("true_token_id", low=0, high=vocab_size - 1)
    if "false_token_id" not in config:
        raise config.unsupported(
            "false_token_id", "a token id, whose logit is subtracted from the logit of true_token_id"
        )
    return yes, config.integer("false_token_id", low=0, high=vocab_size - 1)


def _prompts(config: Config) -> dict[str, str]:
    prompts = config.inner("prompts")
    # Null prompts are skipped.
    return {name: prompts.text(name) for name in prompts.values if name in prompts}
