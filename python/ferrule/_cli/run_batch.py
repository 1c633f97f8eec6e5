"""`ferrule run-batch`: runs a file of requests."""

from __future__ import annotations

import asyncio
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ferrule._cli.help import Command
from ferrule._cli.model import (
    check_model,
    complete_model,
    load_status,
    loading,
    model_options,
    prefix_cache_option,
    speculative_options,
)
from ferrule._cli.status import StatusLine
from ferrule._cli.terminal import is_styled
from ferrule._loading.resolve import EMBEDDED

if TYPE_CHECKING:
    from ferrule._batch import Answered, BatchInput, BatchOutput, Progress
    from ferrule.ray.batch_workers import BatchWorkers
    from ferrule.server.batch_engine import BatchEngine

NEEDED = ("fastapi", "pydantic", "uvicorn")
"""Packages that the server requires."""
INTERVALS = (0.2, 30.0)
"""Seconds between two progress messages, on a terminal and in a log."""


@click.command(
    "run-batch",
    cls=Command,
    examples=[
        (
            "Run all requests; the same command resumes an interrupted run:",
            "ferrule run-batch in.jsonl out.jsonl",
        ),
        ("With a model of the hub:", "ferrule run-batch Qwen/Qwen3-0.6B in.jsonl out.jsonl"),
        (
            "Requests that name another model:",
            "ferrule run-batch ./my-model in.jsonl out.jsonl --served-model-name gpt-4o-mini",
        ),
        ("Retry failed requests:", "ferrule run-batch in.jsonl out.jsonl --retry-errors"),
        (
            "On the hosts of a Ray cluster:",
            "ferrule run-batch Qwen/Qwen3-0.6B in.jsonl out.jsonl --ray auto",
        ),
    ],
)
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] INPUT OUTPUT", shell_complete=complete_model)
@click.option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    help="Further name of the model in requests (default: none). May be repeated.",
)
@click.option("--retry-errors", is_flag=True, help="Run the requests again whose responses in OUTPUT are errors.")
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Run the requests on the hosts of a Ray cluster: HOST:PORT, auto, or local (default: in this process). Each "
    "host has one actor, or with --threads as many actors as fit.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only errors to stderr.")
@model_options
@prefix_cache_option
@speculative_options
def command(
    words: tuple[str, ...],
    served_model_name: tuple[str, ...],
    retry_errors: bool,
    ray: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Run the requests in INPUT (JSON lines in OpenAI's batch format) and write the responses to OUTPUT.

    A line has custom_id, method (POST), url (/v1/chat/completions, /v1/completions or /v1/embeddings) and body.
    Requests run concurrently; responses are written in the order of the input. An invalid request becomes an error in
    the output; the other requests continue, and the exit code is 1. Responses that OUTPUT already has are matched with
    INPUT by custom_id and kept, except errors with --retry-errors.
    """
    model, source, target = _split(words)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise click.UsageError(f"run-batch requires {', '.join(missing)}: pip install 'ferrule[server]'")
    from ferrule._batch import Answered, BatchInput, BatchOutput, check_model_names

    if source.exists() and target.exists() and source.samefile(target):
        raise click.UsageError(f"{target}: INPUT and OUTPUT are the same file")
    names = [model or EMBEDDED, *served_model_name]
    keywords = loading(options)
    with BatchInput(source) as requests:
        with StatusLine(f"reading {source}", quiet=quiet):
            check_model_names(requests, names)
            total = 0 if quiet else requests.count()  # only progress messages show it
        with BatchOutput(target) as output:
            with StatusLine(f"reading {target}", quiet=quiet):
                answered = output.resume(requests)
            if answered.lines and not quiet:
                errors = f", {_counted(answered.failed, 'error')}" if answered.failed else ""
                print(f"resuming after {_counted(answered.lines, 'line')}{errors}", file=sys.stderr)
            if retry_errors and answered.failed:
                output.retry()
                requests.rewind()
                answered = Answered()
            if requests.bytes_read < requests.bytes:
                engine = _engine(ray, model, names, keywords, quiet=quiet)
                _answer(engine, requests, output, answered, total, quiet=quiet)
            elif not quiet:
                print("all requests have responses", file=sys.stderr)
    if answered.failed:
        raise click.ClickException(
            f"{answered.failed} of {answered.lines} lines of {target} are errors; the first is {answered.failure}; "
            "--retry-errors runs these requests again"
        )


def _engine(
    address: str | None, model: str | None, names: list[str], keywords: dict[str, Any], *, quiet: bool
) -> BatchEngine | BatchWorkers:
    if address is not None:
        with StatusLine(f"connecting to the Ray cluster {address}", quiet=quiet):
            from ferrule.ray.batch_workers import BatchWorkers

            return BatchWorkers(address, model, names, **keywords)
    with StatusLine("starting the engine", quiet=quiet):
        from ferrule.server.batch_engine import BatchEngine
    with load_status(model, keywords["revision"], quiet=quiet) as progress:
        return BatchEngine(model, names, progress=progress, **keywords)


def _answer(
    engine: BatchEngine | BatchWorkers,
    requests: BatchInput,
    output: BatchOutput,
    answered: Answered,
    total: int,
    *,
    quiet: bool,
) -> None:
    """Runs the requests that have no answers yet and shows the progress, of `total` lines, and the result."""
    from ferrule._batch import run_batch

    with StatusLine("waiting for the first response", quiet=quiet) as status:
        log = _ProgressLog(status, total, quiet=quiet)

        async def answer() -> Progress:
            async with engine:
                return await run_batch(
                    engine.send, requests, output, at_once=engine.at_once, answered=answered, notify=log.notify
                )

        try:
            progress = asyncio.run(answer())
        except KeyboardInterrupt:
            status.clear()
            if not quiet:
                print("interrupted; the same command continues", file=sys.stderr)
            raise
    if not quiet:
        print(log.counts(_counted(answered.lines, "line"), progress), file=sys.stderr)


def _split(words: tuple[str, ...]) -> tuple[str | None, Path, Path]:
    if not 2 <= len(words) <= 3:
        raise click.UsageError(f"expected [MODEL] INPUT OUTPUT, got {len(words)} arguments")
    *model, source, target = words
    if "-" in (source, target):
        raise click.UsageError("INPUT and OUTPUT must be files, which an interrupted run resumes, got -")
    return check_model(model[0]) if model else None, Path(source), Path(target)


class _ProgressLog:
    """Progress of a run: the text of a status line on a terminal, messages on stderr elsewhere."""

    def __init__(self, status: StatusLine, total: int, *, quiet: bool) -> None:
        self._status = status
        self._total = total
        self._quiet = quiet
        self._terminal = is_styled(sys.stderr)
        self._start = self._last_shown = time.monotonic()

    def notify(self, progress: Progress) -> None:
        """Shows the progress if the last message is old enough."""
        now = time.monotonic()
        if self._quiet or now - self._last_shown < INTERVALS[0 if self._terminal else 1]:
            return
        self._last_shown = now
        text = self.counts(f"{progress.done} of {_counted(self._total, 'line')}", progress)
        if self._terminal:
            self._status.update(text)
        else:
            print(text, file=sys.stderr)

    def counts(self, lines: str, progress: Progress) -> str:
        """Returns the number of answers and their rate."""
        rate = progress.completed / max(time.monotonic() - self._start, 1e-9)
        return f"{lines} answered, {_counted(progress.answered.failed, 'error')}, {rate:.1f} requests/s"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
