"""MODEL and the options that say how it is loaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ferrule.errors import ModelFileError, ModelNotFoundError
from ferrule.llm import LLM
from ferrule.loading.resolve import find_model, is_repository
from ferrule.options import KV_CACHE_DTYPES, QUANTIZATIONS
from ferrule.speculative import MAX_SPECULATIVE_TOKENS, METHODS

Command = TypeVar("Command", bound=Callable[..., Any])
QUICK_SECONDS = 0.3
"""A load that is done by then shows no progress bar."""


def check_model(name: str) -> str:
    """Passes a model's name on; a local one must be there and readable, before anything else is done.

    Raises click.UsageError.
    """
    if not is_repository(name):
        try:
            find_model(name)
        except (ModelNotFoundError, ModelFileError) as error:
            raise click.UsageError(str(error)) from error
    return name


def _check_given(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    return None if name is None else check_model(name)


def model_argument(command: Command) -> Command:
    """Adds `[MODEL]`."""
    return click.argument("model", required=False, callback=_check_given)(command)


def model_options(command: Command) -> Command:
    """Adds the options of loading; the command gets them as keywords and hands them to `load`."""
    options = [
        click.option(
            "--quantization",
            type=click.Choice(QUANTIZATIONS),
            default="auto",
            help="Format of the weights; auto: int8.",
        ),
        click.option("--no-mmap", "mmap", flag_value=False, default=True, help="Read a packed file into memory."),
        click.option("--allow-paging", is_flag=True, help="Let weights be more than memory holds, and decoding slow."),
        click.option(
            "--threads", type=click.IntRange(min=1), help="Default: the processors that this process may use."
        ),
        click.option("--max-model-len", type=click.IntRange(min=1), help="Tokens of prompt and output together."),
        click.option(
            "--kv-cache-dtype", type=click.Choice(KV_CACHE_DTYPES), default="auto", help="Format of the cache."
        ),
        click.option("--tokenizer", callback=_check_given, help="Take the tokenizer from another model."),
        click.option("--revision", help="Branch, tag or commit of a model on the hub."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def prefix_cache_option(command: Command) -> Command:
    """Adds `--prefix-cache-dir`, which `load` takes too; not for measurements, which would find their prompts there."""
    return click.option(
        "--prefix-cache-dir",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="Keep what is computed of prompts there, for the next time that one begins alike.",
    )(command)


def speculative_options(command: Command) -> Command:
    """Adds `--speculative-…`, which `load` takes too: what tokens to come are guessed by."""
    options = [
        click.option(
            "--speculative-method",
            type=click.Choice(METHODS),
            help="Guess tokens to come, and verify several at once. No token changes by it.",
        ),
        click.option("--speculative-model", callback=_check_given, help="A smaller model of the same vocabulary."),
        click.option(
            "--speculative-tokens",
            type=click.IntRange(1, MAX_SPECULATIVE_TOKENS),
            help="Tokens to guess at once, at the most.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _speculative_config(options: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the options of speculation out; None where none was given.

    Raises click.UsageError.
    """
    method, model, tokens = (options.pop(f"speculative_{name}", None) for name in ("method", "model", "tokens"))
    if tokens is not None and method is None and model is None:
        raise click.UsageError("--speculative-tokens needs --speculative-method or --speculative-model")
    given = {"method": method, "model": model, "num_speculative_tokens": tokens}
    return {name: value for name, value in given.items() if value is not None} or None


def loading(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of this module as keywords of LLM and AsyncLLM.

    Raises click.UsageError.
    """
    keywords = dict(options)
    speculative_config = _speculative_config(keywords)
    return keywords if speculative_config is None else {**keywords, "speculative_config": speculative_config}


def load(model: str | None, options: Mapping[str, Any]) -> LLM:
    """Loads a model, with a progress bar if stderr is a terminal and it takes a while."""
    options = loading(options)
    if not sys.stderr.isatty():
        return LLM(model, **options)
    with ProgressBar("loading weights") as bar:
        return LLM(model, progress=bar.update, **options)


class ProgressBar:
    """Bytes of weights, and how long the rest will take; drawn once it has taken long enough to be noticed."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def update(self, done: int, total: int) -> None:
        """Called by the engine as it loads."""
        if self._bar is None:
            if time.monotonic() - self._start < QUICK_SECONDS or done >= total:
                return
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            figures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(
                TextColumn(self._label), BarColumn(), *figures, console=Console(stderr=True), transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
