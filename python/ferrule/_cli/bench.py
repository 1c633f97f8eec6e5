"""`ferrule bench`: prefill and decode speed, compared with the limits of the machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ferrule._bench.machine import Ceilings, Machine
from ferrule._bench.measure import GENERATED_TOKENS, PROMPT_TOKENS, REPEAT, Point, sweep
from ferrule._bench.record import Record, machine_record, model_record
from ferrule._cli.help import Command
from ferrule._cli.model import load, model_argument, model_options, speculative_options
from ferrule._cli.served_models import short_name
from ferrule._cli.status import StatusLine
from ferrule._loading.shapes import find_shape, shape_names
from ferrule._params.sampling import MAX_COUNT
from ferrule._validation import shown

MAX_BATCH = 256
"""Maximum number of concurrent sequences: half of the tokens of a step, so that prefill still makes progress."""
MACHINE_OPTIONS = {"machine", "threads", "repeat", "as_json", "record"}
"""Options that are allowed with --machine."""
ALLOCATING = "allocating memory to measure the machine"


def _counts(limit: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """Parses integers up to `limit`, separated by commas, without duplicates."""

    def read(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
        numbers: list[int] = []
        for word in map(str.strip, text.split(",")):
            number = int(word) if word.isascii() and word.isdigit() and len(word) <= len(str(limit)) else 0
            if not 1 <= number <= limit:
                message = f"must be integers from 1 to {limit}, separated by commas, got {shown(word)}"
                raise click.BadParameter(message, context, parameter)
            numbers.append(number)
        return tuple(dict.fromkeys(numbers))

    return read


@click.command(
    "bench",
    cls=Command,
    examples=[
        ("Speed of a model:", "ferrule bench ./my-model"),
        (
            "Several concurrent sequences and long contexts:",
            "ferrule bench --shape llama-1b --batch 1,8 --context 512,8192",
        ),
        ("Limits of the machine:", "ferrule bench --machine"),
        ("Comparison with an earlier run:", "ferrule bench --json > old.json; ferrule bench --compare old.json"),
    ],
)
@model_argument
@click.option(
    "--shape",
    type=click.Choice(shape_names()),
    help="Well-known shape with random weights to measure instead of MODEL (default: none).",
)
@click.option("--machine", is_flag=True, help="Measure only the limits of the machine, on one thread and on all.")
@click.option(
    "--context",
    "--prompt",
    "contexts",
    callback=_counts(MAX_COUNT),
    metavar="N,...",
    default=str(PROMPT_TOKENS),
    show_default=True,
    help="Prompt lengths in tokens, at which decoding starts.",
)
@click.option(
    "--batch",
    "batches",
    callback=_counts(MAX_BATCH),
    metavar="N,...",
    default="1",
    show_default=True,
    help="Sequences decoded at once.",
)
@click.option(
    "--gen", type=click.IntRange(min=2), default=GENERATED_TOKENS, show_default=True, help="Tokens to generate."
)
@click.option(
    "--repeat", type=click.IntRange(min=1), default=REPEAT, show_default=True, help="Runs; medians are shown."
)
@model_options
@speculative_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--compare",
    "record",
    type=click.Path(path_type=Path),
    metavar="RECORD",
    help="Compare with this output of an earlier --json (default: none).",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE.png|svg",
    help="Draw the roofline (ferrule[plot]).",
)
@click.option(
    "--card",
    "card_file",
    type=click.Path(path_type=Path),
    metavar="FILE.png|svg",
    help="Draw a card to share, with machine, model, speeds and their share of the limits; a PNG needs ferrule[plot] "
    "(default: none).",
)
@click.pass_context
def command(
    context: click.Context,
    model: str | None,
    *,
    shape: str | None,
    machine: bool,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    gen: int,
    repeat: int,
    as_json: bool,
    record: Path | None,
    picture: Path | None,
    card_file: Path | None,
    **loading: Any,
) -> None:
    """Measure prefill and decode speed of MODEL, with random tokens.

    Every context length is measured with every batch size. The limits of the machine are measured between the runs;
    runs during which other processes used the CPUs are repeated.
    """
    from ferrule._bench.card import card, machine_name
    from ferrule._bench.compare import MACHINE_POINTS, compare, point_name, read_record
    from ferrule._bench.plot import plot
    from ferrule._bench.report import show_card_hint, show_comparison, show_machine, show_model
    from ferrule._pictures import check_picture, write_picture
    from ferrule._plotting import check_plot

    if machine:
        _refuse_options_of_models(context)
    if shape is not None and model is not None:
        raise click.UsageError(f"give MODEL or --shape, not both, got {model!r} and {shape!r}")
    # Check files before the measurement, which takes long.
    points = [Point(tokens, batch, gen) for tokens in contexts for batch in batches]
    names = MACHINE_POINTS if machine else [point_name(point.batch, point.context) for point in points]
    old = None if record is None else read_record(record, names)
    if picture is not None:
        check_plot(picture)
    if card_file is not None:
        check_picture("card", card_file)

    if machine:
        new = _measure_machine(loading["threads"], repeat)
    else:
        new = _measure_model(model, shape, loading, points, repeat)
    comparison = None if old is None else compare(old, new)
    if as_json:
        print(json.dumps(new if comparison is None else {**new, "compared": comparison.record()}))
    else:
        (show_machine if machine else show_model)(new)
        if comparison is not None:
            show_comparison(comparison, str(record))
    if picture is not None:
        with StatusLine(f"drawing {picture}"):
            plot(new, picture)
    if card_file is not None:
        shared = {**new, "model": short_name(str(new["model"]))}
        write_picture(card(shared, machine_name()), card_file)
    elif not machine and not as_json:
        show_card_hint()


def _measure_model(
    model: str | None,
    shape: str | None,
    loading: dict[str, Any],
    points: Sequence[Point],
    repeat: int,
) -> Record:
    if shape is not None:
        model, loading = str(find_shape(shape)), {**loading, "load_format": "dummy"}
    # The prompts of a point are the same in each run. The prefix cache would let later runs skip them.
    fixed = {"max_num_seqs": max(point.batch for point in points), "enable_prefix_caching": False}
    with load(model, {**loading, **fixed}) as llm:
        info = llm.info()
        for point in points:
            point.check(info)
        with StatusLine(ALLOCATING) as status:
            machine = Machine(info["threads"])
            runs = sweep(llm, points, machine, repeat, status.update)
    if shape is not None:
        info["model"] = shape
    return model_record(info, runs, machine, repeat)


def _measure_machine(threads: int | None, repeat: int) -> Record:
    from ferrule import _native

    threads = threads or _native.cpu_count()
    rounds: dict[int, list[Ceilings]] = {1: [], threads: []}
    with StatusLine(ALLOCATING) as status:
        machine = Machine(threads)
        for number in range(repeat):
            status.update(f"round {number + 1} of {repeat}")
            for count, taken in rounds.items():
                taken.append(machine.measure(alone=count == 1))
    return machine_record(machine, _native.isa(), threads, rounds)


def _refuse_options_of_models(context: click.Context) -> None:
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in MACHINE_OPTIONS and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            title = parameter.opts[0] if parameter.param_type_name == "option" else "MODEL"
            raise click.UsageError(f"{title} has no effect with --machine, which measures no model")
