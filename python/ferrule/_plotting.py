"""Plots of `--plot`. Matplotlib is part of the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from ferrule.errors import InvalidParameterError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Whether a picture can be drawn and written there, before anything is measured for it.

    Raises InvalidParameterError.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidParameterError("plot", str(path), f"the name of a file that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InvalidParameterError("plot", str(path), "a file in an existing directory")
    _figures()


def new_figure() -> Any:
    """An empty figure of matplotlib, 1200 x 750 pixels.

    Raises InvalidParameterError where matplotlib is not installed.
    """
    # Without pyplot nothing looks for a display.
    return _figures().Figure(figsize=(8, 5), dpi=150, layout="constrained")


def _figures() -> ModuleType:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise InvalidParameterError("plot", None, "left out without matplotlib: pip install 'ferrule[plot]'") from error
    return matplotlib.figure
