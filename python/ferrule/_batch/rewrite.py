"""Rewriting of an output file, in which new answers replace errors.

The new file replaces the old one when it has all lines.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from ferrule._batch.answers import Answer, read_answer
from ferrule.errors import ModelWriteError


class Rewrite:
    """The old file, whose lines were checked, and the new file in the same directory.

    Raises ModelWriteError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # replaces the target of a link, not the link
        self._new = self._path.with_name(f".{self._path.name}.retry")
        self._size = self._path.stat().st_size
        self._number = 0
        self._ahead: BinaryIO = self._path.open("rb")
        self._behind: BinaryIO = self._path.open("rb")
        try:
            self.file: BinaryIO = self._new.open("wb", buffering=0)
        except OSError as error:
            raise ModelWriteError(f"{self._new}: cannot be written: {error.strerror}") from error
        fcntl.flock(self.file, fcntl.LOCK_EX)
        shutil.copymode(self._path, self._new)

    def next(self) -> Answer | None:
        """Returns the next answer of the old file; None for an error, which runs again, and at the end."""
        content = self._ahead.readline()
        self._number += 1
        answer = read_answer(content, self._path, self._number) if content else None
        return None if answer is None or answer.failure is not None else answer

    def pass_line(self) -> bool:
        """Counts a line of the new file; returns whether the new file is complete."""
        self._behind.readline()
        return self._behind.tell() == self._size

    def finish(self) -> None:
        """Copies the remaining lines of the old file and replaces it with the new one.

        Raises ModelWriteError; the old file then remains.
        """
        try:
            while rest := self._behind.read(1 << 20):
                while rest:
                    rest = rest[self.file.write(rest) :]
            os.fsync(self.file.fileno())
            self._new.replace(self._path)
        except OSError as error:
            self._new.unlink(missing_ok=True)
            raise ModelWriteError(f"{self._path}: cannot be written: {error.strerror}") from error
        finally:
            self._ahead.close()
            self._behind.close()
