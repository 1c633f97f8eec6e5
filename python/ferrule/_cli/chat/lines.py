"""Input of messages of one or several lines, with a history that is saved between sessions.

Editing uses the standard library's readline. Text that is pasted with newlines is one message where the terminal
supports bracketed paste.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

BLOCK = '"""'
MAX_MESSAGES = 1000
"""Maximum number of messages in the history; the file is truncated to it when it has twice as many."""
PROMPT, CONTINUED = "> ", ". "


class Lines:
    """Messages from stdin, with editing and history on a terminal."""

    def __init__(self, history: Path | None, complete: Callable[[str], Sequence[str]]) -> None:
        self.interactive = sys.stdin.isatty()
        self._history = history if self.interactive else None
        # input() has no editing unless both are terminals, and would write its prompt to the file.
        self._readline = _readline() if self.interactive and sys.stdout.isatty() else None
        if self._readline is not None:
            _set_up(self._readline, complete)
            for message in self._past():
                self._readline.add_history(message)

    def read(self) -> str:
        """Reads the next message. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        text = self._line(PROMPT)
        if text.lstrip().startswith(BLOCK):
            text = self._block(text.lstrip().removeprefix(BLOCK))
        else:
            while _is_continued(text):
                text = text[:-1] + "\n" + self._line_or_end(CONTINUED)
        self._remember(text)
        return text

    def _block(self, text: str) -> str:
        """Reads lines up to three quotes or the end of the input."""
        while not text.rstrip().endswith(BLOCK):
            try:
                text += "\n" + self._line(CONTINUED)
            except EOFError:
                return text.strip("\n")
        return text.rstrip().removesuffix(BLOCK).strip("\n")

    def _line_or_end(self, prompt: str) -> str:
        try:
            return self._line(prompt)
        except EOFError:
            return ""

    def _line(self, prompt: str) -> str:
        if self._readline is not None:
            return input(prompt)
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _remember(self, message: str) -> None:
        if self._readline is None or not message.strip():
            return
        self._readline.add_history(message)
        if self._history is not None:
            with contextlib.suppress(OSError):  # the chat works without a history
                self._history.parent.mkdir(parents=True, exist_ok=True)
                # Only the user may read the file. Appending keeps the messages of concurrent sessions.
                file = os.open(self._history, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                with open(file, "a", encoding="utf-8") as stream:  # noqa: PTH123  # a descriptor
                    stream.write(json.dumps(message) + "\n")

    def _past(self) -> list[str]:
        """Reads the history of earlier sessions; damaged lines are skipped."""
        if self._history is None:
            return []
        try:
            lines = self._history.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        except OSError:
            return []
        if len(lines) > 2 * MAX_MESSAGES:
            self._cut(lines[-MAX_MESSAGES:])
        messages: list[str] = []
        for line in lines[-MAX_MESSAGES:]:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, str) and "\0" not in message:
                    messages.append(message)
        return messages

    def _cut(self, lines: Sequence[str]) -> None:
        assert self._history is not None  # noqa: S101  # it was read
        new = self._history.with_name(f".{self._history.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            new.touch(0o600)
            new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            new.replace(self._history)


def history_path() -> Path | None:
    """Returns the path of the history, in $XDG_STATE_HOME or ~/.local/state; None without a home directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return home / "ferrule" / "chat_history.jsonl"


def _is_continued(text: str) -> bool:
    """Whether a line ends with an unescaped backslash, which continues the message."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # input() works without readline
        return None
    return readline


def _set_up(readline: ModuleType, complete: Callable[[str], Sequence[str]]) -> None:
    def completion(_word: str, state: int) -> str | None:
        found = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return found[state] if state < len(found) else None

    readline.set_auto_history(False)  # a message may have several lines
    readline.set_completer_delims(" ")
    readline.set_completer(completion)
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    if not libedit:
        readline.parse_and_bind("set enable-bracketed-paste on")
