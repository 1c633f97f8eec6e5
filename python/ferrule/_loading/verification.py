"""Verification of packed files: the checksums of a file are compared once after each boot of the machine.

A background thread of low priority reads the file while the engine already answers requests. The cache records which
files have been verified since the last boot.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ferrule._loading.packed_cache import PackedCache, packed_directory
from ferrule.errors import ModelFileError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File that identifies the current boot. On a system without it, every load verifies its files."""
BACKGROUND_NICENESS = 19
"""Priority of the background thread, the lowest (niceness)."""


def verify(path: Path, *, threads: int = 1, stopped: Callable[[], bool] = lambda: False) -> None:
    """Compares the checksums of a packed file, unless this was done since the machine was booted.

    Returns early once `stopped` returns True. Raises ModelFileError if the file is damaged or cannot be read.
    """
    from concurrent.futures import ThreadPoolExecutor

    from ferrule import _native

    record, state = _record_of(path)
    if _is_recorded(record, state):
        return
    file = _native.PackedFile(os.fspath(path))

    def verify_tensor(index: int) -> None:
        if not stopped():
            file.verify(index)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(verify_tensor, range(len(file.tensors))):
            pass
    if state is not None and not stopped() and _record_of(path)[1] == state:
        _write(record, state)


def mark_used(cache: PackedCache, path: Path) -> None:
    """Sets the time of last use of a file in the cache, and updates the record of its verification accordingly."""
    was_verified = _is_recorded(*_record_of(path))
    cache.touch(path)
    record, state = _record_of(path)
    if was_verified and state is not None:
        _write(record, state)


class Verification:
    """Verifies packed files in the background. The thread keeps no engine alive."""

    def __init__(self, paths: Sequence[Path], damaged: Callable[[str], None]) -> None:
        """Takes the files, and a method that is called with a message if a file is damaged."""
        self._stop = threading.Event()
        arguments = (paths, self._stop, weakref.WeakMethod(damaged))
        self._thread = threading.Thread(target=_verify_all, args=arguments, name="ferrule-verify", daemon=True)
        self._is_needed = bool(paths)

    def start(self) -> None:
        """Starts the thread, if there are files."""
        if self._is_needed:
            self._thread.start()

    def stop(self) -> None:
        """Stops the thread after the current tensor, without waiting for it."""
        self._stop.set()

    def join(self) -> None:
        """Waits for the end of the verification."""
        if self._is_needed:
            self._thread.join()


def _verify_all(
    paths: Sequence[Path], stop: threading.Event, damaged: weakref.WeakMethod[Callable[[str], None]]
) -> None:
    """Verifies files until `stop` is set or the owner of the method `damaged` is garbage collected."""
    with suppress(OSError, AttributeError):  # a system without thread priorities
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
    for path in paths:
        try:
            verify(path, stopped=lambda: stop.is_set() or damaged() is None)
        except ModelFileError as error:
            report = damaged()
            if report is not None and path.exists() and not stop.is_set():
                report(f"{error}; {discard(path)}")
            return
        except RuntimeError as error:
            # Only its message says that the program ends, so that Python starts no more work. This begins before the
            # main thread ends. The next load verifies the file.
            if "shutdown" not in str(error):
                raise
            return


def discard(path: Path) -> str:
    """Removes a damaged file if it is in the cache, and returns advice for the error message."""
    if path.parent != packed_directory():
        return "pack the model again"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"it cannot be removed from the cache ({error.strerror}); remove it to have the model packed again"
    return "it has been removed from the cache, and the next load packs the model again"


def _record_of(path: Path) -> tuple[Path, str | None]:
    """Returns the path of a file's record, and its contents when the file is verified; None if it is not recorded."""
    records = packed_directory().with_name("verified")
    try:
        stat = path.stat()
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return records, None
    return records / f"{stat.st_dev}-{stat.st_ino}", f"{boot} {stat.st_size} {stat.st_mtime_ns}\n"


def _is_recorded(record: Path, state: str | None) -> bool:
    return state is not None and _read(record) == state


def _read(record: Path) -> str | None:
    try:
        return record.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None


def _write(record: Path, state: str) -> None:
    """Writes a record and removes the records of earlier boots. A directory that is not writable is ignored."""
    boot = state.split(maxsplit=1)[0]
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        for other in record.parent.iterdir():
            if not (_read(other) or "").startswith(boot):
                other.unlink(missing_ok=True)
        record.write_text(state, encoding="ascii")
