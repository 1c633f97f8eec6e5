"""The BF16 file of a checkpoint, which llama.cpp and its forks quantize, each with its own quantizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))
from gguf_convert import convert


def finished(file: Path, write: Callable[[Path], None]) -> Path:
    """Returns a file that `write` creates under another name, unless it exists."""
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        write(unfinished)
        unfinished.rename(file)
    return file


def bf16_file(checkpoint: Path, work: Path) -> Path:
    """Returns the GGUF file in BF16, which the tests' converter creates unless it exists."""

    def write(file: Path) -> None:
        convert(checkpoint, file, "BF16", tokenizer=False)

    return finished(work / "BF16.gguf", write)
