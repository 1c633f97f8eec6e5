"""Calibration data for quantization: token sequences, each a window of a text."""

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
"""Default number of calibration tokens: 128 windows. Calibration takes time and memory in proportion."""
WINDOW = 512
"""Length of a window in tokens, special tokens at its beginning included."""
MIN_TOKENS = 256
"""Minimum number of tokens of a text; with fewer, the Hessian of a block of 256 inputs is undetermined."""
_MAX_TOKEN_LENGTH = 16
"""Assumed characters per token. If a text is longer than the wanted tokens need, only parts of it are tokenized."""
_MAX_BYTES = 256 << 20
"""Maximum size of a text file."""

Calibration = str | os.PathLike[str] | Sequence[Sequence[int]]


def calibration_sequences(calibrate: Calibration, files: ModelFiles, tokens: int = TOKENS) -> list[list[int]]:
    """Returns windows spread evenly over a text file, with at most `tokens` tokens; or checks and returns sequences.

    Each window begins with the special tokens of a prompt, such as a beginning-of-sequence token.

    Raises InvalidParameterError if the file cannot be read, is not UTF-8, too large or too short, if `tokens` is less
    than 1, and for token ids outside the vocabulary; TokenizerError if the model has no tokenizer.
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
        pieces = [
            tokenizer.encode_part(piece, begins=True) for piece in _pieces(text, wanted, length * _MAX_TOKEN_LENGTH)
        ]
    except PromptError as error:
        raise InvalidParameterError("calibrate", str(path), f"a file of text ({error})") from error
    if (found := sum(map(len, pieces))) < MIN_TOKENS:
        raise InvalidParameterError("calibrate", str(path), f"a text of at least {MIN_TOKENS} tokens (it has {found})")
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
    """Returns `count` pieces of `length` characters, spread evenly, or the whole text if it is not longer.

    Tokenizing a whole text would take a hundred times its memory.
    """
    if len(text) <= count * length:
        return [text]
    starts = [index * (len(text) - length) // max(count - 1, 1) for index in range(count)]
    return [text[start : start + length] for start in starts]


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise InvalidParameterError("calibrate", str(path), f"a file of at most {_MAX_BYTES} bytes (it has {size})")
        return path.read_bytes().decode()
    except OSError as error:
        raise InvalidParameterError("calibrate", str(path), f"a readable file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidParameterError("calibrate", str(path), f"a UTF-8 file (byte {error.start} is not)") from error
