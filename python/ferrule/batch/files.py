"""The two files of a batch: requests that are read one by one, and answers that are there whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from ferrule.checks import shown
from ferrule.errors import InvalidParameterError, ModelWriteError

LONGEST_LINE = 64 << 20
"""Bytes of a request; a longer line is answered with an error."""


@dataclass(frozen=True)
class Line:
    """A line of the input."""

    number: int
    """From 1."""
    content: bytes | None
    """None where it is longer than LONGEST_LINE."""

    def read(self) -> object:
        """The line as JSON. Raises ValueError."""
        try:
            return json.loads(cast("bytes", self.content))
        except RecursionError:
            raise ValueError("nested too deep") from None

    @property
    def custom_id(self) -> Any:
        """None where the line has none, or is no JSON."""
        if self.content is None:
            return None
        try:
            read = self.read()
        except ValueError:
            return None
        return cast("dict[str, Any]", read).get("custom_id") if isinstance(read, dict) else None


class BatchInput:
    """The lines of a file but for empty ones; no more than one of them is in memory.

    Raises InvalidParameterError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
            self.bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise InvalidParameterError(f"{path}: cannot be read: {error.strerror}") from error
        self.bytes_read = 0
        self._number = 0

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        while content := self._file.readline(LONGEST_LINE + 1):
            self._number += 1
            self.bytes_read += len(content)
            too_long = len(content) > LONGEST_LINE and not content.endswith(b"\n")
            while too_long and content and not content.endswith(b"\n"):
                content = self._file.readline(1 << 20)
                self.bytes_read += len(content)
            if too_long:
                return Line(self._number, None)
            if content.strip():
                return Line(self._number, content)
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


class BatchOutput:
    """A file to which answers are added; one process at a time may have it.

    Raises InvalidParameterError where it cannot be opened, or another process has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise InvalidParameterError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InvalidParameterError(f"{path}: another process writes it") from None

    def resume(self, requests: BatchInput) -> int:
        """Takes from the requests those that have answers, and returns how many; a torn last line is cut off.

        Raises InvalidParameterError where the answers are not those of the requests; the file is left as it is then.
        """
        answered = 0
        whole = 0
        with self.path.open("rb") as file:
            for content in file:
                if not content.endswith(b"\n"):
                    break
                answered += 1
                whole += len(content)
                where = f"{self.path}, line {answered}"
                custom_id = _answered(content, where)
                request = next(requests, None)
                if request is None:
                    raise InvalidParameterError(f"{where}: {requests.path} has no request for it; name another file")
                if request.custom_id != custom_id:
                    raise InvalidParameterError(
                        f"{where}: answers {shown(custom_id)}, but line {request.number} of {requests.path} is "
                        f"{shown(request.custom_id)}; name another file, or remove this one"
                    )
        self._file.truncate(whole)
        return answered

    def write(self, answer: bytes) -> None:
        """Adds a line with one call of the system. Raises ModelWriteError, and leaves nothing of it then."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(answer)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)
            raise ModelWriteError(f"{self.path}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _answered(content: bytes, where: str) -> Any:
    """The custom_id of an answer."""
    try:
        answer: object = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not {"custom_id", "response", "error"} <= cast("dict[str, Any]", answer).keys():
        raise InvalidParameterError(f"{where}: no answer of a batch; name another file, or remove this one")
    return cast("dict[str, Any]", answer)["custom_id"]
