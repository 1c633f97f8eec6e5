"""The tokens that a model runs over as it is quantized: windows of a text, each as a prompt of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ferrule.errors import InvalidParameterError, PromptError
from ferrule.loading import ModelFiles
from ferrule.tokenizer import Tokenizer

TOKENS = 65_536
"""128 windows: more hardly change what is found out, and take longer."""
WINDOW = 512
"""Tokens of a window, those before its text among them."""
FEWEST = 256
"""Tokens of a text below which nothing is known of what goes together: as many as inputs share a step."""
_LARGEST = 256 << 20
"""Bytes of a text."""

Calibration = str | os.PathLike[str] | Sequence[Sequence[int]]


def calibration_sequences(calibrate: Calibration, files: ModelFiles, tokens: int = TOKENS) -> list[list[int]]:
    """At most so many tokens of a file of text, in windows spread evenly over it; or the given sequences as they are.

    A window begins as a prompt of the model does, with a beginning-of-sequence token if it has one.

    Raises InvalidParameterError for a file that cannot be read, is empty, no UTF-8, too large or too short, and for
    less than one token; TokenizerError where the model has no tokenizer.
    """
    if tokens < 1:
        raise InvalidParameterError(f"calibration_tokens is {tokens}; it must be 1 or more")
    if not isinstance(calibrate, str | os.PathLike):
        return [list(sequence) for sequence in calibrate]
    path = Path(calibrate)
    text = _read(path)
    tokenizer = Tokenizer(files.path)
    first = list(tokenizer.first_ids)
    try:
        ids = tokenizer.encode_part(text, begins=True)
    except PromptError as error:
        raise InvalidParameterError(f"calibrate is {path}: {error}") from error
    if len(ids) < FEWEST:
        raise InvalidParameterError(f"calibrate is {path}, a text of {len(ids)} tokens; it must have {FEWEST} at least")
    length = min(WINDOW, files.spec.max_position_embeddings) - len(first)
    windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    count = min(len(windows), max(tokens // (length + len(first)), 1))
    return [first + windows[index * len(windows) // count] for index in range(count)]


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise InvalidParameterError(f"calibrate is {path}, of {size} bytes; the limit is {_LARGEST}")
        return path.read_bytes().decode()
    except OSError as error:
        raise InvalidParameterError(f"calibrate is {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidParameterError(f"calibrate is {path}, which is not UTF-8 at byte {error.start}") from error
