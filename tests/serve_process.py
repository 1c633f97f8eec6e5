"""Starts an HTTP server in a separate process, as a user does."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

START_SECONDS = 300
"""Limit of a start, which takes a second on an idle machine."""


@contextmanager
def served(*command: str, health: str = "/health", stop_within: float = 60) -> Generator[str]:
    """Runs a Python command that says on stderr where it listens; gives its URL once it is healthy."""
    with TemporaryDirectory() as folder:
        # A file, since whatever it logs must go somewhere: a pipe that nobody reads would stop it once it is full.
        log = Path(folder) / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen([sys.executable, *command], stderr=stderr, stdout=subprocess.DEVNULL)
        try:
            yield _healthy(process, log, health)
        finally:
            process.terminate()
            try:
                process.wait(stop_within)
            finally:
                process.kill()


def _healthy(process: subprocess.Popen[bytes], log: Path, health: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"http://[\w.]+:\d+", log.read_text())
        if found is not None and _answers(found[0] + health):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"it did not become healthy: {log.read_text()}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60):
            return True
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        pass
    return False
