"""A program that serves HTTP, in a process of its own, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def served(*command: str, health: str = "/health", stop_within: float = 30) -> Generator[str]:
    """Runs a Python command that says on stderr where it listens; gives its URL once it is healthy."""
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        yield _healthy(process, health)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=stop_within)
        finally:
            process.kill()


def _healthy(process: subprocess.Popen[str], health: str) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        found = re.search(r"http://[\w.]+:\d+", line)
        if found is not None:
            break
    else:
        raise AssertionError(f"it ended before it listened: {said}")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(found[0] + health, timeout=5):
                return found[0]
        except urllib.error.HTTPError as error:
            error.close()
        except urllib.error.URLError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{found[0]}{health} is not healthy")
