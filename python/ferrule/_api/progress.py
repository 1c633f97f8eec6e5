"""Progress bars of `LLM`: the argument `use_tqdm`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias, cast

from ferrule.errors import InvalidParameterError

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""True, False, or a class such as `tqdm.tqdm`."""
BAR_DELAY = 2.0
"""Seconds after which a bar appears, so that short calls show no bar."""


class ProgressBar(Protocol):
    """Interface of a progress bar, which tqdm's bars implement."""

    def update(self, count: float, /) -> object:
        """Adds a number of prompts that are done."""
        ...


class _NoBar:
    """A progress bar that shows nothing."""

    def update(self, count: float, /) -> None:
        """Does nothing."""


def progress_bar(use_tqdm: object, total: int) -> AbstractContextManager[ProgressBar]:
    """Creates a progress bar: tqdm's on a terminal, one of a given class, or one that shows nothing.

    Raises InvalidParameterError.
    """
    if use_tqdm is False or (use_tqdm is True and not _on_terminal()):
        return nullcontext(_NoBar())
    if use_tqdm is True:
        from tqdm import tqdm

        return tqdm(total=total, desc="Processed prompts", delay=BAR_DELAY)
    if not callable(use_tqdm):
        raise InvalidParameterError("use_tqdm", use_tqdm, "True, False, or a class such as tqdm.tqdm")
    return cast("Callable[..., AbstractContextManager[ProgressBar]]", use_tqdm)(total=total, desc="Processed prompts")


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is None, an object without isatty, or closed
        return False
