"""Shapes of well-known models: one folder with a config.json for each, without weights.

`LLM.from_shape` fills them with random weights, to measure speed without a download.
"""

from __future__ import annotations

from pathlib import Path

from ferrule.errors import InvalidParameterError

FOLDER = Path(__file__).parent


def shape_names() -> list[str]:
    """Returns the names of all shapes."""
    return sorted(config.parent.name for config in FOLDER.glob("*/config.json"))


def find_shape(name: str) -> Path:
    """Returns the folder of a shape.

    Raises InvalidParameterError for an unknown name.
    """
    if name not in shape_names():
        raise InvalidParameterError("shape", name, f"one of {', '.join(shape_names())}")
    return FOLDER / name
