"""Sessions in tmux: a shell in a real terminal emulator, to which a test types as a user does."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

SECONDS = 120.0
"""Timeout for expected text; a loaded machine needs many seconds to start Python."""
INTERVAL = 0.1
"""Seconds between two looks at the screen."""
PROMPT = "shell$ "
SHELL = ("sh", "-i")


class Tmux:
    """A tmux server of its own with one session, 160 columns wide."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        # The path of a socket is limited to 107 bytes, which the temporary directory of a test can exceed.
        self._folder = Path(tempfile.mkdtemp(prefix="tmux-", dir="/tmp"))
        self._seen = 0
        # tmux takes PATH from its client, so all variables come with the environment of the first one.
        own = {**environment, "PS1": PROMPT, "LC_ALL": "C.UTF-8"}
        try:
            self._tmux(
                "-f", "/dev/null", "new-session", "-d", "-x", "160", "-y", "50", "-c", str(directory), *SHELL, env=own
            )
            self.wait_for(re.escape(PROMPT.rstrip()))
        except BaseException:
            self._close()
            raise

    def type(self, line: str) -> None:
        """Types a line and Enter. `wait_for` then searches below it."""
        self._seen = len(self.text())
        self._tmux("send-keys", "-l", line)
        self._tmux("send-keys", "Enter")

    def press(self, key: str) -> None:
        """Presses a key under tmux's name, such as `C-c`. `wait_for` then searches below the present text."""
        self._seen = len(self.text())
        self._tmux("send-keys", key)

    def run(self, line: str) -> tuple[str, int]:
        """Types a command; returns its output and exit code once it has ended."""
        self.type(f'{line}; echo "exit=$?."')
        found = self.wait_for(r"exit=(\d+)\.")
        return found.string[: found.start()], int(found[1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until the text since the last keys matches a regular expression, and returns the match."""
        deadline = time.monotonic() + SECONDS
        while True:
            text = self.text()
            assert "Traceback" not in text, text
            if found := re.search(pattern, text[self._seen :]):
                return found
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{text}"
            time.sleep(INTERVAL)

    def text(self) -> str:
        """Returns the scrollback and the screen, with wrapped lines joined."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-").rstrip()

    def _tmux(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        done = self._command(*arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _command(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = ["tmux", "-S", self._folder / "socket", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)

    def _close(self) -> None:
        # The server has ended by itself if its shell has.
        self._command("kill-server")
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
