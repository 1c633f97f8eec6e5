"""Plots for the option `--plot`. Matplotlib is part of the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from ferrule.errors import InvalidParameterError, MissingDependencyError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Checks that a plot can be drawn and written to `path`, before anything is measured.

    Raises InvalidParameterError, and MissingDependencyError if matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidParameterError("plot", str(path), f"a file name that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InvalidParameterError("plot", str(path), "a file in an existing directory")
    _figures()


def new_figure() -> Any:
    """Returns an empty matplotlib figure of 1200 x 750 pixels.

    Raises MissingDependencyError if matplotlib is not installed.
    """
    # pyplot is avoided, because it would search for a display.
    return _figures().Figure(figsize=(8, 5), dpi=150, layout="constrained")


def _figures() -> ModuleType:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingDependencyError("plots require matplotlib: pip install 'ferrule[plot]'") from error
    return matplotlib.figure
