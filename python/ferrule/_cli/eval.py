"""`ferrule eval`: perplexity, divergence from a reference, and accuracy on tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ferrule._api.llm import LLM
from ferrule._cli.help import Command
from ferrule._cli.model import check_model, load, model_options
from ferrule._loading import find_model, read_model_files
from ferrule._params.options import QUANTIZATIONS
from ferrule.errors import InsufficientMemoryError, InvalidParameterError

TEXT_OPTIONS = {"reference", "reference_quantization", "window", "stride", "min_context", "worst", "picture"}
TASK_OPTIONS = {"num_fewshot", "include_path", "chat"}
MAX_TOKEN_CHARACTERS = 64
"""Upper bound of the average characters per token; a text with more per token of a window is surely long enough."""


@click.command(
    "eval",
    cls=Command,
    examples=[
        ("Perplexity of a text:", "ferrule eval ./my-model wiki.test.raw"),
        (
            "Divergence of a quantization from f32:",
            "ferrule eval ./my-model wiki.test.raw --quantization int4 --reference-quantization f32",
        ),
        ("Tasks of lm-evaluation-harness:", "ferrule eval ./my-model --tasks arc_easy,hellaswag --limit 100"),
    ],
)
@click.argument("words", nargs=-1, metavar="[MODEL] FILE")
@click.option("--reference", metavar="MODEL", help="Reference model with the same vocabulary (default: none).")
@click.option(
    "--reference-quantization",
    type=click.Choice(QUANTIZATIONS),
    help="Format of the reference, of MODEL without --reference (default f32).",
)
@click.option(
    "--window", type=click.IntRange(min=2), help="Window length in tokens (default: 512, at most the context length)."
)
@click.option(
    "--stride", type=click.IntRange(min=1), help="Distance between windows in tokens (default: half a window)."
)
@click.option(
    "--min-context",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Minimum number of preceding tokens of a scored token.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), help="Maximum number of windows, or of examples of each task (default: all)."
)
@click.option(
    "--worst",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Number of tokens with the largest divergence to list.",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="Tasks of lm-evaluation-harness to run instead of FILE (default: none); needs ferrule[eval].",
)
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    help="Number of examples before each question of a task (default: the task's).",
)
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Directory with further tasks (default: none).",
)
@click.option(
    "--apply-chat-template", "chat", is_flag=True, help="Render the questions of tasks with the chat template."
)
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE.png|svg",
    help="Draw the distribution of the divergence (ferrule[plot]).",
)
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    *,
    reference: str | None,
    reference_quantization: str | None,
    window: int | None,
    stride: int | None,
    min_context: int,
    limit: int | None,
    worst: int,
    tasks: str | None,
    num_fewshot: int | None,
    include_path: str | None,
    chat: bool,
    as_json: bool,
    picture: Path | None,
    **loading: Any,
) -> None:
    """Measure the perplexity of MODEL (default: the small model that ships with ferrule) on FILE ("-" is stdin).

    FILE is UTF-8 text. It is read in overlapping windows, and each token is scored once. With a reference, the
    divergence (KLD) of the model's probabilities from the reference's is measured too.
    """
    if tasks is not None:
        _refuse(context, TEXT_OPTIONS, "requires FILE; it has no effect with --tasks")
        model = _only_model(words)
        names = list(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
        _run_tasks(
            model,
            loading,
            names,
            as_json=as_json,
            num_fewshot=num_fewshot,
            include_path=include_path,
            chat=chat,
            limit=limit,
        )
        return
    _refuse(context, TASK_OPTIONS, "requires --tasks")
    model, file = _model_and_file(words)
    compared = reference is not None or reference_quantization is not None
    if picture is not None:
        from ferrule._plotting import check_plot

        if not compared:
            raise click.UsageError("--plot requires --reference or --reference-quantization; it draws the divergence")
        check_plot(picture)
    # Check files before the model is loaded, which takes long.
    text = _read(file)
    other = model if reference is None else check_model(reference)
    window = _fitting_window(window, model, loading)
    cutting: dict[str, Any] = {"window": window, "stride": stride, "min_context": min_context, "limit": limit}
    # Evaluation runs one sequence at a time and never repeats a prompt.
    fixed = {"max_num_seqs": 1, "enable_prefix_caching": False}
    loading = {**loading, **fixed, "max_model_len": loading["max_model_len"] or window}
    with ExitStack() as stack:
        llm = stack.enter_context(load(model, loading))
        if len(text) <= MAX_TOKEN_CHARACTERS * window and (tokens := len(llm.tokenize(text))) < window:
            raise click.UsageError(
                f"{file} must have at least {window} tokens, one window, got {tokens}; give a longer text or lower "
                "--window"
            )
        if not compared:
            with _progress("perplexity") as progress:
                result = llm.perplexity(text, **cutting, progress=progress)
            _show(as_json, "show_perplexity", {"file": file, **_facts(llm)}, result)
            return
        against = stack.enter_context(_load_reference(other, reference, reference_quantization, loading))
        with _progress("comparison") as progress:
            comparison = llm.compare(against, text, **cutting, worst=worst, progress=progress)
        _show(as_json, "show_comparison", {"file": file, **_facts(llm), "reference": _facts(against)}, comparison)
        if picture is not None:
            from ferrule._evaluation.plot import plot

            names = [f"{facts['model']}, {facts['quantization']}" for facts in (_facts(llm), _facts(against))]
            plot(comparison, " from ".join(names), picture)


def _run_tasks(
    model: str | None,
    loading: Mapping[str, Any],
    names: list[str],
    *,
    as_json: bool,
    num_fewshot: int | None,
    include_path: str | None,
    chat: bool,
    limit: int | None,
) -> None:
    from ferrule.harness import FerruleLM, run_tasks

    with load(model, loading) as llm:
        results = run_tasks(
            FerruleLM(llm), names, num_fewshot=num_fewshot, include_path=include_path, chat=chat, limit=limit
        )
        _show(as_json, "show_tasks", _facts(llm), results)


def _show(as_json: bool, table: str, facts: Mapping[str, Any], result: Any) -> None:
    from ferrule._cli import eval_report

    record = eval_report.record(facts, result)
    if as_json:
        print(json.dumps(record))
    else:
        getattr(eval_report, table)(record)


def _facts(llm: LLM) -> dict[str, Any]:
    info = llm.info()
    return {name: info[name] for name in ("model", "quantization", "kv_cache_dtype", "isa", "weight_bytes")}


def _load_reference(model: str | None, named: str | None, quantization: str | None, loading: Mapping[str, Any]) -> LLM:
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


def _fitting_window(window: int | None, model: str | None, loading: Mapping[str, Any]) -> int:
    """Returns the window length: `--window`, or the default, reduced to the context length if that is shorter.

    Raises InvalidParameterError, and the errors of `read_model_files`.
    """
    from ferrule._evaluation import DEFAULT_WINDOW

    context = read_model_files(find_model(model, loading["revision"])).spec.max_position_embeddings
    context = min(context, loading["max_model_len"] or context)
    if window is not None and window > context:
        raise InvalidParameterError("window", window, f"at most {context}, the context length")
    return window or min(DEFAULT_WINDOW, context)


def _only_model(words: tuple[str, ...]) -> str | None:
    if len(words) > 1:
        raise click.UsageError(f"--tasks takes only MODEL, got {len(words)} arguments")
    return check_model(words[0]) if words else None


def _model_and_file(words: tuple[str, ...]) -> tuple[str | None, str]:
    if not 1 <= len(words) <= 2:
        raise click.UsageError(f"expected [MODEL] FILE or --tasks, got {len(words)} arguments")
    *model, file = words
    return check_model(model[0]) if model else None, file


def _read(file: str) -> str:
    """Reads a text from a file or from stdin.

    Raises InvalidParameterError.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as error:  # ValueError for a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise click.UsageError(f"{file.encode('unicode_escape').decode()} cannot be read: {reason}") from None
    if not content.strip():
        raise click.UsageError(f"{file} must have text to predict, got an empty file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{content[error.start]:02x}"
        raise click.UsageError(f"{file} must be UTF-8 text; {found}") from None


def _refuse(context: click.Context, names: set[str], requirement: str) -> None:
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} {requirement}")


@contextmanager
def _progress(title: str) -> Generator[Callable[[int, int], None] | None, None, None]:
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
