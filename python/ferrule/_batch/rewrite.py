"""Rewriting of an output file, so that errors within it can be replaced by answers.

The new file replaces the old one once it has all lines.
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
    """The old file, whose lines were all checked, and the new one beside it.

    Raises ModelWriteError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # what a link leads to is replaced, and not the link
        self._new = self._path.with_name(f".{self._path.name}.retry")
        self._size = self._path.stat().st_size
        self._ahead: BinaryIO = self._path.open("rb")
        self._behind: BinaryIO = self._path.open("rb")
        try:
            self.file: BinaryIO = self._new.open("wb", buffering=0)
        except OSError as error:
            raise ModelWriteError(f"{self._new}: cannot be written: {error.strerror}") from error
        fcntl.flock(self.file, fcntl.LOCK_EX)
        shutil.copymode(self._path, self._new)

    def next(self) -> Answer | None:
        """The next answer of the old file; None behind the last, and for one that is to be made again."""
        content = self._ahead.readline()
        answer = read_answer(content, str(self._path)) if content else None
        return None if answer is None or answer.failure is not None else answer

    def pass_line(self) -> bool:
        """Notes that the new file has a further line; whether it has them all."""
        self._behind.readline()
        return self._behind.tell() == self._size

    def finish(self) -> None:
        """Puts the new file in the place of the old one, with what the old one has behind.

        Raises ModelWriteError, and leaves the old one then.
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
