"""Vision towers: one file for each family of models that read images, and one line in TOWERS.

A tower is a separate model, whose tokens are the patches of an image: their values take the place of token
embeddings. The embeddings that it computes take the place of those of placeholder tokens in the language model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ferrule.archs.config import Config
from ferrule.archs.spec import ModelSpec
from ferrule.archs.vision.idefics3 import idefics3

TOWERS: Mapping[str, Callable[[Config], ModelSpec]] = MappingProxyType(
    {
        "idefics3": idefics3,
        "smolvlm": idefics3,
    }
)
"""Functions that read the tower's spec from config.json, by `model_type` of the whole model."""


@dataclass(frozen=True)
class VisionSpec:
    """The part of a model that reads images."""

    model_type: str
    """`model_type` of the whole model, which decides how images are processed."""
    tower: ModelSpec


def vision_spec(config: Config) -> VisionSpec | None:
    """Returns the part of a model that reads images; None for models that read text only.

    Raises ConfigError for a value outside its limits, UnsupportedModelError for an unsupported value.
    """
    model_type = str(config.values.get("model_type"))
    if model_type not in TOWERS or "vision_config" not in config:
        return None
    return VisionSpec(model_type, TOWERS[model_type](config))
