"""A process that stays loaded and answers one JSON line with another."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast


class ChildError(Exception):
    """A child process ended or failed before it answered."""


class Child:
    """A child process, started by the constructor; `greeting` is its first answer, sent when it has loaded."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._command = command
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(  # noqa: S603 -- commands are compare.py's own
                command,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._requests = cast("TextIO", self._process.stdin)
        self._answers = cast("TextIO", self._process.stdout)
        self.greeting = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the answer to a request. Raises ChildError."""
        try:
            self._requests.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def close(self) -> None:
        """Waits for the process to end, and kills it if it does not."""
        with suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> ChildError:
        self.close()
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        status = self._process.returncode
        return ChildError(f"{' '.join(self._command[:3])} ended with {status}: {''.join(last)} (see {self._log})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
