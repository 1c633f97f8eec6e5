"""`ferrule eval`: perplexity, divergence from a reference, and accuracy on tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ferrule._cli.eval_formats import Candidate, Plan, candidates, measure, spread
from ferrule._cli.eval_loading import (
    ONE_SEQUENCE,
    check_length,
    context_length,
    facts,
    fitting_window,
    load_reference,
    window_progress,
)
from ferrule._cli.help import Command
from ferrule._cli.model import check_model, load, model_options
from ferrule._cli.served_models import short_name
from ferrule._cli.status import StatusLine
from ferrule._params.options import QUANTIZATIONS

TEXT_OPTIONS = {
    "compared",
    "reference",
    "reference_quantization",
    "window",
    "stride",
    "min_context",
    "worst",
    "picture",
}
TASK_OPTIONS = {"num_fewshot", "include_path", "chat"}
SINGLE_OPTIONS = {"quantization", "worst"}
"""Options without an effect on a comparison of several formats."""


class EvalCommand(Command):
    """The command, whose option `--compare` takes several values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments."""
        return super().parse_args(ctx, spread(args))


@click.command(
    "eval",
    cls=EvalCommand,
    examples=[
        ("Perplexity of a text:", "ferrule eval ./my-model wiki.test.raw"),
        (
            "Divergence of a quantization from f32:",
            "ferrule eval ./my-model wiki.test.raw --quantization int4 --reference-quantization f32",
        ),
        (
            "Size, speed and divergence of several formats:",
            "ferrule eval ./my-model wiki.test.raw --compare bf16 int8 int4 --plot formats.svg",
        ),
        ("Tasks of lm-evaluation-harness:", "ferrule eval ./my-model --tasks arc_easy,hellaswag --limit 100"),
    ],
)
@click.argument("words", nargs=-1, metavar="[MODEL] FILE")
@click.option(
    "--compare",
    "compared",
    multiple=True,
    metavar="A B ...",
    help="Formats of MODEL, other models (path or name) or FORMAT@MODEL, whose size, speed and divergence from the "
    "reference to compare (default: none). It follows FILE.",
)
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
    help="Draw the distribution of the divergence (ferrule[plot]), or with --compare the formats (a PNG needs it too).",
)
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    *,
    compared: tuple[str, ...],
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

    --compare A B ... measures several formats of MODEL and other files with its vocabulary: size, speed, and divergence
    from the reference, which is MODEL in f32 unless another is given.
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
    model, file = _model_and_file(words, compared)
    several = candidates(model, compared)
    if several:
        _refuse(context, SINGLE_OPTIONS, "has no effect with --compare")
    has_reference = reference is not None or reference_quantization is not None
    if picture is not None:
        _check_picture(picture, several=bool(several), has_reference=has_reference)
    # Check files before the model is loaded, which takes long.
    text = _read(file)
    other = model if reference is None else check_model(reference)
    context_tokens = context_length(model, loading)
    window = fitting_window(window, context_tokens)
    windows: dict[str, Any] = {"window": window, "stride": stride, "min_context": min_context, "limit": limit}
    if several:
        loading = {**loading, **ONE_SEQUENCE}
        exact = reference_quantization or "f32"
        name = exact if reference is None else f"{exact}@{short_name(reference)}"
        against = Candidate(name, other, exact, is_given=reference is not None)
        _compare_formats(Plan(several, against, file, text, windows, loading), picture, as_json=as_json)
        return
    loading = {**loading, **ONE_SEQUENCE, "max_model_len": loading["max_model_len"] or window}
    with ExitStack() as stack:
        llm = stack.enter_context(load(model, loading))
        check_length(file, text, window, llm)
        if not has_reference:
            with window_progress("perplexity") as progress:
                result = llm.perplexity(text, **windows, progress=progress)
            _show(as_json, "show_perplexity", {"file": file, **facts(llm)}, result)
            return
        against = stack.enter_context(load_reference(other, reference, reference_quantization, loading))
        with window_progress("comparison") as progress:
            comparison = llm.compare(against, text, **windows, worst=worst, progress=progress)
        _show(as_json, "show_comparison", {"file": file, **facts(llm), "reference": facts(against)}, comparison)
        if picture is not None:
            names = [f"{found['model']}, {found['quantization']}" for found in (facts(llm), facts(against))]
            with StatusLine(f"drawing {picture}"):
                from ferrule._evaluation.plot import plot

                plot(comparison, " from ".join(names), picture)


def _compare_formats(plan: Plan, picture: Path | None, *, as_json: bool) -> None:
    from ferrule._cli import eval_report

    record = measure(plan)
    if as_json:
        print(json.dumps(record))
    else:
        eval_report.show_formats(record)
    if picture is not None:
        from ferrule._bench.card import machine_name
        from ferrule._evaluation.chart import chart
        from ferrule._pictures import write_picture

        write_picture(chart(record, machine_name()), picture)


def _check_picture(picture: Path, *, several: bool, has_reference: bool) -> None:
    if several:
        from ferrule._pictures import check_picture

        check_picture("plot", picture)
        return
    from ferrule._plotting import check_plot

    if not has_reference:
        raise click.UsageError(
            "--plot requires --compare, --reference or --reference-quantization; it draws the divergence"
        )
    check_plot(picture)


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
        _show(as_json, "show_tasks", facts(llm), results)


def _show(as_json: bool, table: str, facts: Mapping[str, Any], result: Any) -> None:
    from ferrule._cli import eval_report

    record = eval_report.record(facts, result)
    if as_json:
        print(json.dumps(record))
    else:
        getattr(eval_report, table)(record)


def _only_model(words: tuple[str, ...]) -> str | None:
    if len(words) > 1:
        raise click.UsageError(f"--tasks takes only MODEL, got {len(words)} arguments")
    return check_model(words[0]) if words else None


def _model_and_file(words: tuple[str, ...], compared: tuple[str, ...]) -> tuple[str | None, str]:
    if not 1 <= len(words) <= 2:
        place = " before --compare" if compared else ""
        raise click.UsageError(f"expected [MODEL] FILE or --tasks{place}, got {len(words)} arguments")
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
