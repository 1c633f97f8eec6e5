"""Temporary directories beside a target, which are renamed to it once they are complete.

A killed process leaves its directory behind. It loses its lock, by which the next process knows that it may remove it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

ABANDONED = 10.0
"""Seconds after which an unlocked file or directory counts as abandoned by a killed process."""


@contextmanager
def temporary_directory(target: Path, *, shared: bool = False) -> Generator[Path]:
    """Creates a hidden directory beside `target`, and removes it at the end unless it was renamed.

    Abandoned directories of the same target are removed first; in a directory that is `shared` by such targets only,
    those of all targets.

    Raises OSError.
    """
    prefix = f".{target.name}."
    folder = target.with_name(f"{prefix}{os.getpid()}-{time.time_ns()}.tmp")
    lock: int | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, "." if shared else prefix)
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes temporary directories of killed processes."""
    for folder in parent.glob(f"{prefix}*.tmp"):
        try:
            if time.time() - folder.stat().st_mtime < ABANDONED:
                continue
        except OSError:  # removed meanwhile
            continue
        with locked_directory(folder) as is_abandoned:
            if is_abandoned:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked_directory(folder: Path) -> Generator[bool]:
    """Locks a directory while the context is active, without waiting.

    Yields False if that fails: another process has locked or removed it, or it is a link, a file, or of another user.
    """
    handle: int | None = None
    is_locked = False
    try:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked
    finally:
        if handle is not None:
            os.close(handle)
