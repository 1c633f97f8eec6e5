"""Processes that load a model together with an empty cache: one of them packs it, and all map the same file."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from ferrule._loading import lock_file
from ferrule._loading.packed_cache import PackedCache
from packed_models import load

pytestmark = pytest.mark.native

SECONDS = 300
"""Timeout of a process."""
LOAD = """
import re, sys
from pathlib import Path
from ferrule import LLM, _native
from ferrule._loading import packing

packing.SMALLEST = 0
pack = _native.pack

def packed(*arguments, **options):
    print("packs", flush=True)
    sys.stdin.readline()
    pack(*arguments, **options)

_native.pack = packed
llm = LLM(threads=1, kv_cache_memory=1 << 24)
file = llm.info()["packed_file"]
maps = Path("/proc/self/maps")
lines = maps.read_text().splitlines() if maps.exists() else []
inodes = {line.split()[4] for line in lines if line.endswith(file)}
print("mapped", *inodes or [Path(file).stat().st_ino], flush=True)
"""
"""Loads the embedded model; before it is packed, waits for a line on stdin."""
Process = subprocess.Popen[str]


@pytest.fixture
def start(packed_cache: PackedCache) -> Iterator[Callable[[], Process]]:
    """Starts a process that loads the model, with the cache of this test."""
    children: list[Process] = []

    def start() -> Process:
        command = [sys.executable, "-c", LOAD]
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return children[-1]

    def kill() -> None:
        for child in children:
            child.kill()

    timer = threading.Timer(SECONDS, kill)  # the end of a process ends the wait for its output
    timer.start()
    yield start
    timer.cancel()
    kill()
    for child in children:
        child.communicate()


@pytest.fixture
def two(start: Callable[[], Process]) -> tuple[Process, Process]:
    """A process that is about to pack the model, and one that waits for it."""
    first = start()
    assert first.stdout is not None
    assert first.stdout.readline() == "packs\n"
    second = start()
    assert second.stderr is not None
    assert second.stderr.readline().startswith("waiting for another process that packs weights into ")
    return first, second


def test_one_process_packs_and_both_map_its_file(two: tuple[Process, Process], packed_cache: PackedCache) -> None:
    outputs = [child.communicate("\n", timeout=SECONDS) for child in two]
    [file] = packed_cache.directory.iterdir()  # without a lock file
    assert outputs == [(f"mapped {file.stat().st_ino}\n", "")] * 2
    assert [child.returncode for child in two] == [0, 0]


def test_process_that_waits_packs_after_the_other_is_killed(
    two: tuple[Process, Process], packed_cache: PackedCache
) -> None:
    first, second = two
    first.kill()
    output, errors = second.communicate("\n", timeout=SECONDS)
    [file] = packed_cache.directory.iterdir()
    assert (output, errors, second.returncode) == (f"packs\nmapped {file.stat().st_ino}\n", "", 0)


def test_ctrl_c_ends_the_wait_and_not_the_packing(two: tuple[Process, Process], packed_cache: PackedCache) -> None:
    first, second = two
    second.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in second.communicate(timeout=SECONDS)[1]
    assert second.returncode == -signal.SIGINT
    output, errors = first.communicate("\n", timeout=SECONDS)
    [file] = packed_cache.directory.iterdir()
    assert (output, errors, first.returncode) == (f"mapped {file.stat().st_ino}\n", "", 0)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_weights_are_packed_without_locks(
    packed_cache: PackedCache, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(lock_file.fcntl, "flock", flock)
    file = load(TINY)["packed_file"]
    assert file == load(TINY)["packed_file"] == str(packed_cache.entries()[0].path)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_weights_are_packed_where_the_lock_file_cannot_be_created(
    packed_cache: PackedCache, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    open_path, refused = Path.open, 0

    def open_others(path: Path, *arguments: Any, **options: Any) -> Any:
        nonlocal refused
        if path.name.endswith(".lock.tmp"):
            refused += 1
            raise OSError(error, os.strerror(error), str(path))
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_others)
    file = load(TINY)["packed_file"]
    assert refused
    assert file == load(TINY)["packed_file"] == str(packed_cache.entries()[0].path)


def test_lock_of_a_killed_process_is_taken_over(packed_cache: PackedCache, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with lock_file.locked(path, "waits"):
        assert path.exists()
        with path.open("ab") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not path.exists()


def test_lock_file_of_another_process_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock_file.locked(path, "waits"):
        path.unlink()
        path.touch()
    assert path.exists()


def test_cleaner_leaves_a_lock_file_that_replaced_an_abandoned_one(
    packed_cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the cleaner's opening and locking of a file, its process ends and another one creates the next."""
    packed_cache.directory.mkdir(parents=True, exist_ok=True)
    path = packed_cache.directory / ".model.safetensors.lock.tmp"
    path.touch()
    os.utime(path, (0, 0))
    flock = fcntl.flock

    def locked_late(*arguments: Any) -> None:
        path.unlink()
        path.touch()
        flock(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", locked_late)
        assert packed_cache.remove_abandoned() == 0
    assert path.exists()
    os.utime(path, (0, 0))
    assert packed_cache.remove_abandoned() == 1
    assert not path.exists()


def test_lock_of_a_removed_file_is_not_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds the lock removes the file between another's opening and locking it."""
    path = tmp_path / "lock"
    flock, locks = fcntl.flock, 0

    def locked_late(*arguments: object) -> None:
        nonlocal locks
        locks += 1
        if locks == 1:
            path.unlink()
        flock(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(lock_file.fcntl, "flock", locked_late)
    with lock_file.locked(path, "waits"), path.open("ab") as other, pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert locks == 2
