"""MODEL and the options that say how it is loaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ferrule._api.llm import LLM
from ferrule._cli.help import options
from ferrule._loading.resolve import EMBEDDED, find_model, is_repository
from ferrule._params.options import KV_CACHE_DTYPES, QUANTIZATIONS
from ferrule._params.speculative import MAX_SPECULATIVE_TOKENS, METHODS
from ferrule.errors import ModelFileError, ModelNotFoundError

Command = TypeVar("Command", bound=Callable[..., Any])
LOADING = "Loading"
"""What the options are about."""
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


def complete_model(_context: click.Context, _parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """What a shell may make of the beginning of a model's name: what is here, or a path."""
    from ferrule._loading.hub_cache import downloads

    names = [EMBEDDED, *(model.name for model in downloads())]
    return [CompletionItem(name) for name in names if name.startswith(start)] or [CompletionItem(start, type="file")]


def model_argument(command: Command) -> Command:
    """Adds `[MODEL]`."""
    return click.argument("model", required=False, callback=_check_given, shell_complete=complete_model)(command)


def model_options(command: Command) -> Command:
    """Adds the options of loading; the command gets them as keywords and hands them to `load`."""
    threads = "Default: the processors that this process may use."
    paging = "Let weights be more than memory holds, and decoding slow."
    table: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("--quantization",), {**_one_of(QUANTIZATIONS), "help": "Format of the weights; auto: int8."}),
        (("--no-mmap", "mmap"), {"flag_value": False, "default": True, "help": "Read a packed file into memory."}),
        (("--allow-paging",), {"is_flag": True, "help": paging}),
        (("--threads",), {"type": click.IntRange(min=1), "help": threads}),
        (("--max-model-len",), {"type": click.IntRange(min=1), "help": "Tokens of prompt and output together."}),
        (("--kv-cache-dtype",), {**_one_of(KV_CACHE_DTYPES), "help": "Format of the cache."}),
        (("--tokenizer",), {"callback": _check_given, "help": "Take the tokenizer from another model."}),
        (("--revision",), {"help": "Branch, tag or commit of a model on the hub."}),
    ]
    return options(LOADING, table)(command)


def _one_of(names: Sequence[str]) -> dict[str, Any]:
    return {"type": click.Choice(names), "default": "auto"}


def prefix_cache_option(command: Command) -> Command:
    """Adds `--prefix-cache-dir`, which `load` takes too; not for measurements, which would find their prompts there."""
    settings = {
        "type": click.Path(file_okay=False),
        "metavar": "DIR",
        "help": "Keep what is computed of prompts there, for the next time that one begins alike.",
    }
    return options(LOADING, [(("--prefix-cache-dir",), settings)])(command)


def speculative_options(command: Command) -> Command:
    """Adds `--speculative-…`, which `load` takes too: what tokens to come are guessed by."""
    method = "Guess tokens to come, and verify several at once. No token changes by it."
    most = click.IntRange(1, MAX_SPECULATIVE_TOKENS)
    table: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("--speculative-method",), {"type": click.Choice(METHODS), "help": method}),
        (("--speculative-model",), {"callback": _check_given, "help": "A smaller model of the same vocabulary."}),
        (("--speculative-tokens",), {"type": most, "help": "Tokens to guess at once, at the most."}),
    ]
    return options("Speculation", table)(command)


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
    with load_progress() as progress:
        return LLM(model, progress=progress, **loading(options))


@contextmanager
def load_progress() -> Generator[Callable[[int, int], None] | None, None, None]:
    """What a load calls to show how far it is; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with ProgressBar("loading weights") as bar:
        yield bar.update


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
