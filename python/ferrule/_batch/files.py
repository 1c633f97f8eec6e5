"""Files of a batch: the input, read line by line, and the output, whose lines are written atomically."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from ferrule._batch.answers import Answer, read_answer
from ferrule._batch.rewrite import Rewrite
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError, ModelWriteError

MAX_LINE_BYTES = 64 << 20
"""Maximum size of a line, in bytes; a longer line gets an error."""


@dataclass(frozen=True)
class Line:
    """A line of the input."""

    number: int
    """Number of the line, from 1."""
    content: bytes | None
    """Content of the line; None if it is longer than MAX_LINE_BYTES."""
    custom_id: Any
    """Custom id of the request; None if the line has none or is not JSON."""
    same_id: int | None
    """Number of the first line with the same custom_id; None if this is the first."""

    def read(self) -> object:
        """Parses the line as JSON. Raises ValueError."""
        return _parsed(cast("bytes", self.content))


class BatchInput:
    """Yields the non-empty lines of a file. Memory holds one line, and a digest of the custom id of each line.

    Raises InvalidParameterError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_regular("input_file", path)
        try:
            self._file: BinaryIO = path.open("rb")
            self.bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise InvalidParameterError("input_file", str(path), f"a readable file ({error.strerror})") from error
        self.rewind()

    def rewind(self) -> None:
        """Starts again at the first line."""
        self._file.seek(0)
        self.bytes_read = 0
        self._number = 0
        self._first: dict[bytes, int] = {}

    def count(self) -> int:
        """Returns the number of non-empty lines of the whole file, which it reads in blocks of bounded size."""
        lines, has_text = 0, False
        with self.path.open("rb") as file:
            while block := file.read(1 << 20):
                rest, *ends = block.split(b"\n")
                has_text = has_text or bool(rest.strip())
                for end in ends:
                    lines += has_text
                    has_text = bool(end.strip())
        return lines + has_text

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        while content := self._file.readline(MAX_LINE_BYTES + 1):
            self._number += 1
            self.bytes_read += len(content)
            too_long = len(content) > MAX_LINE_BYTES and not content.endswith(b"\n")
            while too_long and content and not content.endswith(b"\n"):
                content = self._file.readline(1 << 20)
                self.bytes_read += len(content)
            if too_long:
                return Line(self._number, None, None, None)
            if content.strip():
                return self._line(content)
        raise StopIteration

    def _line(self, content: bytes) -> Line:
        try:
            read = _parsed(content)
        except ValueError:
            read = None
        custom_id = cast("dict[str, Any]", read).get("custom_id") if isinstance(read, dict) else None
        same = None
        if isinstance(custom_id, str):
            # Digests bound the memory, since every line has an id, and ids may be long.
            digest = blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
            first = self._first.setdefault(digest, self._number)
            same = None if first == self._number else first
        return Line(self._number, content, custom_id, same)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


@dataclass
class Answered:
    """Contents of an output file."""

    lines: int = 0
    failed: int = 0
    """Number of answers that are errors."""
    failure: str | None = None
    """Line and message of the first error."""

    def count(self, answer: Answer) -> None:
        """Counts the next answer."""
        self.lines += 1
        if answer.failure is not None:
            self.failed += 1
            name = "" if answer.custom_id is None else f" ({shown(answer.custom_id)})"
            self.failure = self.failure or f"line {self.lines}{name}: {answer.failure}"


class BatchOutput:
    """Output file to which answers are appended, locked for this process.

    Raises InvalidParameterError for a file that cannot be opened or that another process has locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_regular("output_file", path)
        self._rewrite: Rewrite | None = None
        self._old: BinaryIO | None = None
        try:
            self._file: BinaryIO = path.open("a+b", buffering=0)
        except OSError as error:
            raise InvalidParameterError("output_file", str(path), f"a writable file ({error.strerror})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InvalidParameterError("output_file", str(path), "a file that no other process writes") from None

    def resume(self, requests: BatchInput) -> Answered:
        """Skips the requests that have answers and truncates an incomplete last line.

        Raises InvalidParameterError for a file with answers to other requests, which remains unchanged.
        """
        answered = Answered()
        whole = 0
        with self.path.open("rb") as file:
            for content in file:
                if not content.endswith(b"\n"):
                    break
                whole += len(content)
                answer = read_answer(content, self.path, answered.lines + 1)
                answered.count(answer)
                request = next(requests, None)
                if request is None:
                    mismatch = "has no request"
                elif request.custom_id != answer.custom_id:
                    mismatch = f"has custom_id {shown(request.custom_id)}, not {shown(answer.custom_id)}"
                else:
                    continue
                requirement = f"responses to {requests.path}, which {mismatch} for line {answered.lines}"
                raise InvalidParameterError("output_file", str(self.path), requirement)
        self._file.truncate(whole)
        return answered

    def retry(self) -> None:
        """Starts to rewrite the file: answers are copied, and errors are replaced by new answers.

        The old file remains until each of its lines has an answer. Raises ModelWriteError.
        """
        self._rewrite = Rewrite(self.path)
        self._old, self._file = self._file, self._rewrite.file  # the old file stays open to keep its lock

    def kept(self) -> Answer | None:
        """Returns the existing answer to the next request; None if the request must run."""
        return None if self._rewrite is None else self._rewrite.next()

    def write(self, answer: Answer) -> None:
        """Appends a line with one system call.

        Raises ModelWriteError; the file is then unchanged.
        """
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(answer.content)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)
            raise ModelWriteError(f"{self.path}: cannot be written: {error.strerror}") from error
        if self._rewrite is not None and self._rewrite.pass_line():
            self._finish_rewrite()

    def _finish_rewrite(self) -> None:
        rewrite, self._rewrite = self._rewrite, None
        if rewrite is not None:
            rewrite.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._finish_rewrite()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
            if self._old is not None:
                self._old.close()


def _parsed(content: bytes) -> object:
    """Parses JSON. Raises ValueError, also for deep nesting."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def _check_regular(field: str, path: Path) -> None:
    """Refuses pipes and devices: resuming requires reading them again, and opening a pipe would block."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InvalidParameterError(field, str(path), "a regular file")
