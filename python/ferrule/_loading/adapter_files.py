"""adapter_config.json of PEFT adapters.

PEFT adds fields with every version, and some of them change what an adapter computes. So every field that is neither
read here nor listed as harmless must be off.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from ferrule._validation import shown
from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.errors import ModelNotFoundError

FILE = "adapter_config.json"
MAX_RANK = 65_536

_HARMLESS = {
    # These fields affect training only.
    *("task_type", "inference_mode", "lora_dropout", "revision", "ensure_weight_tying"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config"),
    # These are the version of PEFT, and settings of features that are off.
    *("peft_version", "auto_mapping", "megatron_core", "qalora_group_size"),
    # This describes how the base model stores matrices, which does not affect the adapter.
    "fan_in_fan_out",
}
_READ = {
    *("peft_type", "base_model_name_or_path", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora"),
    *("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
_BASE_AS_IT_IS = (True, False, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base weights unchanged; other ones require a modified base model."""
_NAME = re.compile(r"\^?[\w-]+(?:\\?\.[\w-]+)*", re.ASCII)


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's directory and configuration, without its tensors."""

    directory: Path
    base_model: str | None
    """Name of the base model in the adapter's configuration."""
    config: AdapterConfig


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA configuration: changed modules, ranks and scaling factors."""

    rank: int
    alpha: float
    """Numerator of the scaling factor (`lora_alpha`)."""
    rank_stabilized: bool
    """Whether the scaling factor is divided by the square root of the rank (rsLoRA, Kalajdzievski 2023), not the
    rank."""
    rank_pattern: list[tuple[str, int]]
    """Ranks of modules by name suffix; the first match applies."""
    alpha_pattern: list[tuple[str, float]]
    targets: list[str] | None
    """Changed modules by name suffix; None if only the tensors name them."""
    excluded: list[str]
    layers: list[int] | None

    def to_json(self) -> str:
        """Returns the configuration as JSON for the native module."""
        return json.dumps(asdict(self), allow_nan=False)


def read_adapter_files(directory: Path) -> AdapterFiles:
    """Reads an adapter's configuration.

    Raises ModelNotFoundError if it is missing, ModelFileError, ConfigError, and UnsupportedModelError for adapters
    that are not plain low-rank updates of linear maps.
    """
    try:
        config = Config.read(directory / FILE)
    except ModelNotFoundError:
        raise ModelNotFoundError(
            f"{directory}: {FILE} is missing; give a directory that PEFT's save_pretrained wrote"
        ) from None
    _refuse_unsupported(config)
    base_model = config.text("base_model_name_or_path") if "base_model_name_or_path" in config else None
    by_tensors = any(_is_pattern(config, field) for field in ("target_modules", "exclude_modules"))
    # If the model has several stacks of layers, only the tensor names identify the stack.
    by_tensors = by_tensors or bool(config.values.get("layers_pattern")) or "target_modules" not in config
    return AdapterFiles(
        directory,
        base_model,
        AdapterConfig(
            rank=config.integer("r", high=MAX_RANK),
            alpha=config.number("lora_alpha", low=0),
            rank_stabilized=config.flag("use_rslora", default=False),
            rank_pattern=[
                (name, each.integer(key, high=MAX_RANK)) for name, key, each in _by_name(config, "rank_pattern")
            ],
            alpha_pattern=[(name, each.number(key, low=0)) for name, key, each in _by_name(config, "alpha_pattern")],
            targets=None if by_tensors else config.texts("target_modules"),
            excluded=[] if by_tensors else config.texts("exclude_modules"),
            layers=_layers(config),
        ),
    )


def _refuse_unsupported(config: Config) -> None:
    if config.values.get("peft_type") != "LORA":
        raise config.unsupported("peft_type", '"LORA"')
    config.require(bias="none")
    if "init_lora_weights" in config and config.values["init_lora_weights"] not in _BASE_AS_IT_IS:
        limit = (
            f"one of {', '.join(map(json.dumps, _BASE_AS_IT_IS))}; others require a base model with modified weights"
        )
        raise config.unsupported("init_lora_weights", limit)
    for field, value in config.values.items():
        if field not in _READ | _HARMLESS and value not in (None, False, [], {}, ""):
            raise config.unsupported(field, "off (null, false or empty)")


def _is_pattern(config: Config, field: str) -> bool:
    """Whether a field is a regular expression, or a word for all modules, rather than a list of names."""
    return isinstance(config.values.get(field), str)


def _by_name(config: Config, field: str) -> list[tuple[str, str, Config]]:
    """Returns module name, field and configuration of each entry of an object whose keys are modules."""
    inner = config.inner(field)
    names: list[tuple[str, str, Config]] = []
    for key in inner.values:
        if _NAME.fullmatch(key) is None:
            found = shown(cast("object", key))
            raise config.unsupported(
                field, f"an object whose keys are names of modules or their endings, not patterns such as {found}"
            )
        names.append((key.replace("\\.", "."), key, inner))
    return names


def _layers(config: Config) -> list[int] | None:
    value = config.values.get("layers_to_transform")
    if value is None or value == []:
        return None
    if isinstance(value, int):
        return [config.integer("layers_to_transform", low=0, high=MAX_LAYERS)]
    return config.integers("layers_to_transform", low=0, high=MAX_LAYERS)
