"""`ferrule quantize`: writes a directory with packed weights, which loads fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ferrule._api.allocation import BitAllocation, allocate_bits, check_bits
from ferrule._api.calibration import TOKENS
from ferrule._api.generated_calibration import GENERATED_TOKENS, generate_calibration
from ferrule._api.info import size_text
from ferrule._api.pruning import METHODS, checked_pruning, default_method
from ferrule._api.quantization import FORMATS, checked_paths, pruned_share, quantize
from ferrule._api.recipe import Recipe
from ferrule._cli.help import Command, options
from ferrule._cli.model import LOADING, engine_rows, load_status, model_argument
from ferrule.errors import InsufficientMemoryError, UnsupportedTaskError

_SHARED = ("revision", "threads", "calibrate", "calibration_tokens")
"""Settings of both the allocation and the quantization."""


def _names(_context: click.Context, _parameter: click.Parameter, text: str | None) -> list[str] | None:
    """Returns names separated by commas."""
    return None if text is None else [name.strip() for name in text.split(",")]


@click.command(
    "quantize",
    cls=Command,
    examples=[
        (
            "Four bits a weight, for `ferrule run my-model-int4`:",
            "ferrule quantize org/repo --format int4 -o my-model-int4",
        ),
        (
            "From a GGUF file of a repository:",
            "ferrule quantize org/repo:Q8_0 --format int4 -o my-model-int4",
        ),
        (
            "Formats by matrix, 4.85 bits a weight in total:",
            "ferrule quantize org/repo --bits 4.85 --report -o my-model",
        ),
        (
            "Calibrated with your text, which is more accurate and slower:",
            "ferrule quantize org/repo --calibrate text.txt -o my-model-int4",
        ),
    ],
)
@model_argument
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="Format of the weights (default int4).",
)
@click.option(
    "--bits",
    type=click.FloatRange(min=0, max=32, min_open=True),
    metavar="FLOAT",
    help="Bits per weight of all matrices together; chooses trellis2 to int8 for each by calibrated errors "
    "(default: none).",
)
@click.option(
    "--formats",
    callback=_names,
    metavar="NAME,NAME,...",
    help="Formats from which --bits chooses (default: all). Without trellis2 to trellis5, models decode faster.",
)
@click.option(
    "--recipe",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="TOML file with the format of each matrix (default: none).",
)
@click.option(
    "--save-recipe",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the formats that --bits chose as a recipe (default: none).",
)
@click.option("--report", is_flag=True, help="Print format, bytes and error of each matrix that --bits chose.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    required=True,
    help="Output directory, new or empty (required).",
)
@click.option("--overwrite", is_flag=True, help="Replace DIR if an earlier `ferrule quantize` wrote it.")
@click.option(
    "--calibrate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="TEXT",
    help="Text file for calibration (GPTQ): more accurate and much slower; with --bits, it also chooses the "
    "formats by calibrated errors (default: none).",
)
@click.option(
    "--self-calibrate/--no-self-calibrate",
    default=None,
    help="Calibrate with text that the model generates (default: with --bits, unless there is --calibrate).",
)
@click.option(
    "--calibration-tokens",
    type=click.IntRange(min=1),
    help=f"Maximum number of calibration tokens (default: {TOKENS}; {GENERATED_TOKENS} generated ones).",
)
@click.option(
    "--sparsity",
    metavar="SHARE",
    help="Set weights of the linear layers to zero: a share such as 0.5, or 2:4, two of each four inputs; needs "
    "--format. int8 and int4 become sparse formats, int4 with 2:4 alone (default: none).",
)
@click.option(
    "--pruning",
    type=click.Choice(METHODS),
    help="Method that chooses the weights of --sparsity; sparsegpt and wanda need calibration (default sparsegpt "
    "with calibration, else magnitude).",
)
@options(LOADING, engine_rows("threads", "revision"))
def command(model: str | None, output: Path, **settings: Any) -> None:
    """Quantize and pack the weights of MODEL into DIR, with all other files of the model.

    DIR is created at the end, complete or not at all. Calibration keeps finished layers beside DIR, and the same
    command continues after them if it was interrupted. --format, --bits and --recipe exclude each other, and
    --sparsity needs --format.
    """
    _check_combinations(settings)
    bits, formats, save, report = (settings.pop(name) for name in ("bits", "formats", "save_recipe", "report"))
    revision = settings["revision"]
    name = settings["format"] or "int4"
    if bits is not None or settings["self_calibrate"]:
        with load_status(model, revision):
            # Calibration takes minutes: refuse first what `quantize` would refuse after it.
            checked_paths(
                model,
                output,
                format=name,
                revision=revision,
                overwrite=settings["overwrite"],
                calibrates=settings["sparsity"] is None,  # any format can be pruned with calibration
            )
            if bits is not None:
                check_bits(model, bits, formats=formats, revision=revision)
            if settings["recipe"] is not None:
                Recipe.read(settings["recipe"])
            checked_pruning(settings["sparsity"], settings["pruning"], format=name, calibrates=True)
    _generate_calibration(model, settings, needed=settings.pop("self_calibrate"), chooses=bits is not None)
    if bits is not None:
        with load_status(model, revision, label="measuring errors") as progress:
            shared = {key: settings[key] for key in _SHARED}
            allocation = allocate_bits(model, bits, formats=formats, progress=progress, **shared)
        settings["recipe"] = allocation.recipe()
        name = f"{allocation.bits:.2f} bits per weight"
        if save is not None:
            settings["recipe"].save(save)
        if report:
            print(_report(allocation))
    elif settings["recipe"] is not None:
        name = str(settings["recipe"])
    elif settings["sparsity"] is not None:
        method = settings["pruning"] or default_method(calibrates=settings["calibrate"] is not None)
        name += f", {settings['sparsity']} sparse ({method})"
    try:
        with load_status(model, revision, label="quantizing") as progress:
            written = quantize(model, output, progress=progress, **settings)
    except KeyboardInterrupt as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        raise
    size = size_text(sum(path.stat().st_size for path in written.rglob("*") if path.is_file()))
    print(f"{written}: {name}, {size}", file=sys.stderr)
    if settings["sparsity"] is not None:
        print(pruned_share(written), file=sys.stderr)


def _check_combinations(settings: dict[str, Any]) -> None:
    """Raises UsageError for options that exclude or need each other."""
    given = [name for name in ("format", "bits", "recipe") if settings[name] is not None]
    if len(given) > 1:
        raise click.UsageError(f"--{given[0]} cannot be used with --{given[1]}")
    if settings["sparsity"] is not None and settings["format"] is None:
        raise click.UsageError("--sparsity needs --format")
    if settings["pruning"] is not None and settings["sparsity"] is None:
        raise click.UsageError("--pruning needs --sparsity")
    if settings["self_calibrate"] and settings["calibrate"] is not None:
        raise click.UsageError("--self-calibrate cannot be used with --calibrate")
    if settings["bits"] is None:
        for name in ("save_recipe", "report", "formats"):
            if settings[name]:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --bits")


def _generate_calibration(model: str | None, settings: dict[str, Any], *, needed: bool | None, chooses: bool) -> None:
    """Sets `calibrate` to text that the model generates, if that is `needed`, or not forbidden where --bits `chooses`.

    Only needed text is an error where there is none.
    """
    tokens = settings["calibration_tokens"]
    settings["calibration_tokens"] = TOKENS if tokens is None else tokens
    wanted = chooses and settings["calibrate"] is None if needed is None else needed
    if not wanted:
        return
    tokens = GENERATED_TOKENS if tokens is None else tokens
    given = {key: settings[key] for key in ("revision", "threads")}
    try:
        with load_status(model, given["revision"], label="generating text", unit="tokens") as progress:
            settings["calibrate"] = generate_calibration(model, tokens, progress=progress, **given)
    except (UnsupportedTaskError, InsufficientMemoryError) as error:
        if needed:
            raise
        print(f"not calibrated: {error}", file=sys.stderr)


def _report(allocation: BitAllocation) -> str:
    """Returns a table of all matrices, with the share of each in the estimated loss."""
    rows = [("tensor", "format", "bits", "bytes", "error", "loss")]
    total = sum(matrix.loss for matrix in allocation.matrices) or 1.0
    for matrix in allocation.matrices:
        bits, share = 8 * matrix.bytes / matrix.weights, matrix.loss / total
        numbers = (f"{bits:.2f}", f"{matrix.bytes:,}", f"{matrix.error:.2e}", f"{share:.1%}")
        rows.append((matrix.tensor, matrix.format, *numbers))
    rows.append(("all matrices", "", f"{allocation.bits:.2f}", f"{allocation.bytes:,}", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ((row[0].ljust(widths[0]), row[1].ljust(widths[1]), *map(str.rjust, row[2:], widths[2:])) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
