"""Reading the small files of a model: bounded, and only regular files, because a pipe could block forever."""

from __future__ import annotations

import stat
from pathlib import Path

from ferrule.errors import ModelFileError, ModelNotFoundError

MAX_FILE_BYTES = 16 << 20
"""Largest configuration file, in bytes."""


def read_file(file: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Reads a file of at most `limit` bytes.

    Raises ModelNotFoundError if it is missing; ModelFileError if it is larger, cannot be read, is not a regular file,
    or is a Git LFS pointer.
    """
    try:
        status = file.stat()
        if status.st_size > limit:
            raise ModelFileError(f"{file}: {status.st_size} bytes; the limit is {limit}")
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise ModelFileError(f"{file}: not a regular file")
        content = file.read_bytes()
    except FileNotFoundError:
        raise ModelNotFoundError(f"{file}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{file}: {error.strerror or error}") from error
    if content.startswith(b"version https://git-lfs"):
        raise ModelFileError(f"{file}: a Git LFS pointer, not the file itself; download it with `git lfs pull`")
    return content
