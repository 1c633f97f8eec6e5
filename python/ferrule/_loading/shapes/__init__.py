"""Shapes of well-known models without their weights: one folder with a config.json for each.

`LLM.from_shape` fills them with random numbers, so that anyone can ask how fast a model of a size is here.
"""

from __future__ import annotations

from pathlib import Path

from ferrule._validation import shown
from ferrule.errors import InvalidParameterError

FOLDER = Path(__file__).parent


def shape_names() -> list[str]:
    """The names that `find_shape` knows."""
    return sorted(config.parent.name for config in FOLDER.glob("*/config.json"))


def find_shape(name: str) -> Path:
    """The folder of a shape.

    Raises InvalidParameterError for a name that is not one.
    """
    if name not in shape_names():
        raise InvalidParameterError(f"shape is {shown(name)}; it must be one of {', '.join(shape_names())}")
    return FOLDER / name
