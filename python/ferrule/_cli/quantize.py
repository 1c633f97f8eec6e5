"""`ferrule quantize`: writes a directory with packed weights, which loads fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ferrule._api.calibration import TOKENS
from ferrule._api.info import size_text
from ferrule._api.quantization import FORMATS, quantize
from ferrule._cli.help import Command, options
from ferrule._cli.model import LOADING, ProgressBar, engine_rows, model_argument


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
            "With calibration, which is more accurate and slower:",
            "ferrule quantize org/repo --calibrate text.txt -o my-model-int4",
        ),
    ],
)
@model_argument
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    default="int4",
    show_default=True,
    help="Format of the weights.",
)
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
    help="Text file for calibration (GPTQ): more accurate and much slower (default: none).",
)
@click.option(
    "--calibration-tokens",
    type=click.IntRange(min=1),
    default=TOKENS,
    show_default=True,
    help="Maximum number of calibration tokens.",
)
@options(LOADING, engine_rows("threads", "revision"))
def command(model: str | None, output: Path, **settings: Any) -> None:
    """Quantize and pack the weights of MODEL into DIR, with all other files of the model.

    DIR is created at the end, complete or not at all.
    """
    with ProgressBar("quantizing") as bar:
        written = quantize(model, output, progress=bar.update if sys.stderr.isatty() else None, **settings)
    size = size_text(sum(path.stat().st_size for path in written.rglob("*") if path.is_file()))
    print(f"{written}: {settings['format']}, {size}", file=sys.stderr)
