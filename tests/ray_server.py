"""Starts `ferrule serve --ray` in a separate process, as a user does."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 600
"""Timeout of the start, of requests and of conditions."""


@contextmanager
def ray_server(cluster: str, *options: str, log: Path) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """Gives the URL and the process of a server on a Ray cluster, whose stderr is written to `log`."""
    port = str(free_port())
    command = (sys.executable, "-m", "ferrule", "serve", *options, "--ray", cluster, "--port", port)
    with (
        log.open("wb") as stderr,
        subprocess.Popen((*command, "--log-format", "text"), stderr=stderr, stdout=subprocess.DEVNULL) as process,
    ):
        try:
            deadline = time.monotonic() + SECONDS
            while f"http://127.0.0.1:{port}/v1" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            finally:
                process.kill()


def free_port() -> int:
    """Returns a free port that no system assigns to other programs meanwhile."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
