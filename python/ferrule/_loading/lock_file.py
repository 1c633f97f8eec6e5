"""Lock files: one process at a time does what a lock file guards, and the others wait for it.

The lock is that of `flock`, which ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO

LOGGER = logging.getLogger("ferrule.loading")
POLL_INTERVAL = 0.1
"""Seconds between two attempts to lock a file. Python handles Ctrl-C between them, but not in a blocking `flock`."""
REPORT_INTERVAL = 60.0
"""Seconds between two log records about the wait."""


@contextmanager
def locked(path: Path, activity: str) -> Generator[None]:
    """Holds the lock of a file while the context is active; waits for it if another process or thread holds it.

    The file is created, and removed at the end. Log records about the wait say what the other process does, `activity`.
    Where the file cannot be created, or the file system has no locks, the context is active at once.
    """
    lock = _lock(path, activity)
    try:
        yield
    finally:
        if lock is not None:
            # Before the lock ends, since the next process may lock the file then.
            with suppress(OSError):
                if is_at(lock, path):  # and not the lock file of a process that came after a removal
                    path.unlink()
            lock.close()


def _lock(path: Path, activity: str) -> BufferedWriter | None:
    """Returns the locked file; None if there are no locks."""
    next_report = time.monotonic()
    while True:
        try:
            return _try_lock(path)
        except BlockingIOError:
            pass
        except OSError:
            return None
        if time.monotonic() >= next_report:
            LOGGER.warning("waiting for another process that %s (lock file %s)", activity, path)
            next_report += REPORT_INTERVAL
        time.sleep(POLL_INTERVAL)


def _try_lock(path: Path) -> BufferedWriter:
    """Returns the locked file. Raises BlockingIOError if another process holds the lock, and other OSErrors."""
    file = path.open("ab")  # NFS locks files only for processes that may write them
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(file, path):
            raise BlockingIOError  # the process that held the lock has removed the file
    except BaseException:
        file.close()
        raise
    return file


def is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one at a path, and was neither removed nor replaced. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
