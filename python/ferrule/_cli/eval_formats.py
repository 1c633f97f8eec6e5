"""`ferrule eval --compare`: size, speed and divergence of several formats of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import click

from ferrule._api.llm import LLM
from ferrule._bench.machine import Machine
from ferrule._bench.measure import GENERATED_TOKENS, PROMPT_TOKENS, REPEAT, Point, sweep
from ferrule._bench.record import model_record
from ferrule._cli.eval_loading import check_length, context_length, facts, load_reference, window_progress
from ferrule._cli.model import check_model, load
from ferrule._cli.served_models import short_name
from ferrule._cli.status import StatusLine
from ferrule._params.options import QUANTIZATIONS
from ferrule.errors import InsufficientMemoryError

CONTEXT_OF_SPEED = PROMPT_TOKENS + GENERATED_TOKENS
"""Context length in tokens with which a model that has it is loaded at least, to measure its speed."""
PARTS = ("prefill", "decode")
OPTION = "--compare"


@dataclass(frozen=True)
class Candidate:
    """A format to compare."""

    name: str
    model: str | None
    """Model to load; None: the small one that ships with ferrule."""
    quantization: str
    is_given: bool
    """Whether the model was given with the format, instead of MODEL."""


@dataclass(frozen=True)
class Plan:
    """Models and text of a comparison."""

    candidates: Sequence[Candidate]
    reference: Candidate
    file: str
    text: str
    windows: Mapping[str, Any]
    """Arguments `window`, `stride`, `min_context` and `limit` of `LLM.compare_each`."""
    loading: Mapping[str, Any]
    """Options of loading."""


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeats `--compare` before each of its values, since an option of click takes a fixed number of them."""
    spread: list[str] = []
    takes = False
    for word in arguments:
        if takes and not word.startswith("-") and spread[-1] != OPTION:
            spread.append(OPTION)
        takes = word == OPTION or word.startswith(f"{OPTION}=") or (takes and not word.startswith("-"))
        spread.append(word)
    return spread


def candidates(model: str | None, names: Sequence[str]) -> list[Candidate]:
    """Reads the values of `--compare`: a quantization of MODEL, another model, or `QUANTIZATION@MODEL`.

    Candidates have short names; those whose short name is not unique have the given ones.

    Raises click.UsageError.
    """
    found = {given: _candidate(model, given) for given in dict.fromkeys(names)}
    counts = Counter(each.name for each in found.values())
    return [each if counts[each.name] == 1 else replace(each, name=given) for given, each in found.items()]


def _candidate(model: str | None, name: str) -> Candidate:
    if name in QUANTIZATIONS:
        return Candidate(name, model, name, is_given=False)
    quantization, separator, other = name.partition("@")
    if not separator or quantization not in QUANTIZATIONS:
        try:
            return Candidate(short_name(name), check_model(name), "auto", is_given=True)
        except click.UsageError as error:
            formats = ", ".join(QUANTIZATIONS)
            raise click.UsageError(f"{OPTION} must name formats ({formats}) or models, got {name!r}: {error}") from None
    return Candidate(f"{quantization}@{short_name(other)}", check_model(other), quantization, is_given=True)


def measure(plan: Plan) -> dict[str, Any]:
    """Loads the reference and all formats, and returns their figures as a record."""
    from ferrule._cli.eval_report import formats_record

    with ExitStack() as stack:
        reference = stack.enter_context(_load_reference(plan))
        check_length(plan.file, plan.text, plan.windows["window"], reference)
        models = [stack.enter_context(_load(each, plan)) for each in plan.candidates]
        with StatusLine("allocating memory to measure the machine"):
            machine = Machine(reference.info()["threads"])
        names = [plan.reference.name, *(each.name for each in plan.candidates)]
        rows = [
            {"name": name, **_facts(llm), **_speeds(name, llm, machine)}
            for name, llm in zip(names, [reference, *models], strict=True)
        ]
        with window_progress("comparison") as progress:
            comparisons = reference.compare_each(models, plan.text, **plan.windows, worst=0, progress=progress)
    return formats_record({"file": plan.file, "repeat": REPEAT}, rows, comparisons)


def _load(candidate: Candidate, plan: Plan) -> LLM:
    try:
        return load(candidate.model, _options(candidate, plan))
    except InsufficientMemoryError as error:
        raise InsufficientMemoryError(
            f"not enough memory for the reference and all formats at once: {error}; compare fewer formats"
        ) from error


def _load_reference(plan: Plan) -> LLM:
    named = plan.reference.model if plan.reference.is_given else None
    return load_reference(plan.reference.model, named, plan.reference.quantization, _options(plan.reference, plan))


def _options(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    """Returns the options of loading, with a context for a window and, as far as the model has it, for the speed."""
    options = {**plan.loading, "quantization": candidate.quantization}
    if candidate.is_given:
        options["revision"] = None  # the option is the revision of MODEL
    context = min(context_length(candidate.model, options), CONTEXT_OF_SPEED)
    return {**options, "max_model_len": max(context, plan.windows["window"])}


def _facts(llm: LLM) -> dict[str, Any]:
    info = llm.info()
    bits = 8 * info["weight_bytes"] / info["parameters"]
    return {**facts(llm), "threads": info["threads"], "bits_per_weight": bits}


def _speeds(name: str, llm: LLM, machine: Machine) -> dict[str, Any]:
    """Measures prefill and decode, with a shorter prompt where the context is short."""
    info = llm.info()
    generated = min(GENERATED_TOKENS, info["max_model_len"] // 2)
    point = Point(min(PROMPT_TOKENS, info["max_model_len"] - generated), 1, generated)
    with StatusLine(f"measuring the speed of {name}") as status:
        runs = sweep(llm, [point], machine, REPEAT, lambda step: status.update(f"{name}: {step}"))
    record = model_record(info, runs, machine, REPEAT)
    return {f"{part}_{each}": record[f"{part}_{each}"] for part in PARTS for each in ("tokens", "tokens_per_second")}
