"""Plots for the option `--plot`. Matplotlib is part of the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from ferrule._pictures import check_file
from ferrule.errors import MissingDependencyError


def check_plot(path: Path) -> None:
    """Checks that a plot can be drawn and written to `path`, before anything is measured.

    Raises InvalidParameterError, and MissingDependencyError if matplotlib is not installed.
    """
    check_file("plot", path)
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
