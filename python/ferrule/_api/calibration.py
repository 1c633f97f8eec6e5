"""The tokens that a model runs over as it is quantized: windows of a text, each as a prompt of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from ferrule._loading import ModelFiles
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import check_integer
from ferrule.errors import InvalidParameterError, PromptError

TOKENS = 65_536
"""128 windows: more hardly change what is found out, and take longer."""
WINDOW = 512
"""Tokens of a window, those before its text among them."""
FEWEST = 256
"""Tokens of a text below which nothing is known of what goes together: as many as inputs share a step."""
_CHARACTERS = 16
"""Of a text that is longer than that many for each token wanted, only pieces are tokenized."""
_LARGEST = 256 << 20
"""Bytes of a text."""

Calibration = str | os.PathLike[str] | Sequence[Sequence[int]]


def calibration_sequences(calibrate: Calibration, files: ModelFiles, tokens: int = TOKENS) -> list[list[int]]:
    """At most so many tokens of a file of text, in windows spread evenly over it; or sequences as they are given.

    A window begins as a prompt of the model does, with a beginning-of-sequence token if it has one.

    Raises InvalidParameterError for a file that cannot be read, is empty, no UTF-8, too large or too short, for less
    than one token, and for sequences of anything but the vocabulary's ids; TokenizerError where the model has no
    tokenizer.
    """
    if tokens < 1:
        raise InvalidParameterError("calibration_tokens", tokens, ">= 1")
    if not isinstance(calibrate, str | os.PathLike):
        return _checked(calibrate, files.spec.vocab_size)
    path = Path(calibrate)
    text = _read(path)
    tokenizer = Tokenizer(files.path)
    first = list(tokenizer.first_ids)
    length = min(WINDOW, files.spec.max_position_embeddings) - len(first)
    wanted = max(tokens // (length + len(first)), 1)
    try:
        pieces = [tokenizer.encode_part(piece, begins=True) for piece in _pieces(text, wanted, length * _CHARACTERS)]
    except PromptError as error:
        raise InvalidParameterError("calibrate", str(path), f"a file of text ({error})") from error
    if (found := sum(map(len, pieces))) < FEWEST:
        raise InvalidParameterError("calibrate", str(path), f"a text of at least {FEWEST} tokens (it has {found})")
    if len(pieces) == 1:
        windows = [pieces[0][start : start + length] for start in range(0, len(pieces[0]), length)]
    else:
        windows = [ids[:length] for ids in pieces]
    count = min(len(windows), wanted)
    return [first + windows[index * len(windows) // count] for index in range(count)]


def _checked(sequences: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    checked: list[list[int]] = []
    for i, sequence in enumerate(sequences):
        if isinstance(sequence, str | bytes) or not isinstance(cast("object", sequence), Iterable):
            raise InvalidParameterError(f"calibrate[{i}]", sequence, "a list of token ids")
        checked.append(
            [check_integer(f"calibrate[{i}][{j}]", id_, 0, vocab_size - 1) for j, id_ in enumerate(sequence)]
        )
    return checked


def _pieces(text: str, count: int, length: int) -> list[str]:
    """So many pieces of so many characters, spread evenly; or all of the text, if it is no longer.

    Tokens of a text take a hundred times its memory.
    """
    if len(text) <= count * length:
        return [text]
    starts = [index * (len(text) - length) // max(count - 1, 1) for index in range(count)]
    return [text[start : start + length] for start in starts]


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise InvalidParameterError("calibrate", str(path), f"a file of at most {_LARGEST} bytes (it has {size})")
        return path.read_bytes().decode()
    except OSError as error:
        raise InvalidParameterError("calibrate", str(path), f"a readable file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidParameterError("calibrate", str(path), f"a UTF-8 file (byte {error.start} is not)") from error
