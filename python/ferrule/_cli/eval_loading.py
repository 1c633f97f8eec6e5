"""Models of `ferrule eval`: the reference, the length of a window, facts for a record, and the progress of windows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from ferrule._api.llm import LLM
from ferrule._cli.model import download, load, model_status
from ferrule._loading import find_model, read_model_files
from ferrule.errors import InsufficientMemoryError, InvalidParameterError

MAX_TOKEN_CHARACTERS = 64
"""Upper bound of the average characters per token; a text with more per token of a window is surely long enough."""
ONE_SEQUENCE: Mapping[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
"""Options of loading: evaluation runs one sequence at a time and never repeats a prompt."""


def facts(llm: LLM) -> dict[str, Any]:
    """Returns the facts about a model for a record."""
    info = llm.info()
    return {name: info[name] for name in ("model", "quantization", "kv_cache_dtype", "isa", "weight_bytes")}


def load_reference(model: str | None, named: str | None, quantization: str | None, loading: Mapping[str, Any]) -> LLM:
    """Loads the reference in addition to the model.

    Raises InsufficientMemoryError if memory does not suffice for both, and the errors of `LLM`.
    """
    options = {**loading, "quantization": quantization or "f32"}
    if named is not None:
        options["revision"] = None  # the option is the revision of MODEL
    try:
        return load(model, options)
    except InsufficientMemoryError as error:
        raise InsufficientMemoryError(
            f"not enough memory for model and reference: {error}; use a smaller --reference-quantization"
        ) from error


def context_length(model: str | None, loading: Mapping[str, Any]) -> int:
    """Returns the context length of a model, reduced to `--max-model-len`.

    The model is downloaded if it is not in the cache.

    Raises the errors of `read_model_files`.
    """
    download(model, loading["revision"])
    with model_status("reading the configuration", model):
        context = read_model_files(find_model(model, loading["revision"])).spec.max_position_embeddings
    return min(context, loading["max_model_len"] or context)


def fitting_window(window: int | None, context: int) -> int:
    """Returns the window length: `--window`, or the default, reduced to the context length if that is shorter.

    Raises InvalidParameterError.
    """
    from ferrule._evaluation import DEFAULT_WINDOW

    if window is not None and window > context:
        raise InvalidParameterError("window", window, f"at most {context}, the context length")
    return window or min(DEFAULT_WINDOW, context)


def check_length(file: str, text: str, window: int, llm: LLM) -> None:
    """Raises click.UsageError if a text is shorter than a window."""
    if len(text) <= MAX_TOKEN_CHARACTERS * window and (tokens := len(llm.tokenize(text))) < window:
        raise click.UsageError(
            f"{file} must have at least {window} tokens, one window, got {tokens}; give a longer text or lower --window"
        )


@contextmanager
def window_progress(title: str) -> Generator[Callable[[int, int], None] | None, None, None]:
    """Shows a progress bar on stderr, if that is a terminal, and erases it at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("windows"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
