"""Layers that an interrupted calibration has finished, in a folder beside its output."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIX = ".layers"


@contextmanager
def kept_layers(target: Path, digest: str) -> Generator[Path | None]:
    """Yields the folder that keeps the finished layers of a calibration until the output `target` is complete.

    `digest` identifies the calibration, in 16 hexadecimal digits. Yields None if another process uses the folder. An
    exception gets a note that names the folder, if there are finished layers. If there is none, the folders of all
    calibrations for `target` are removed, except those that other processes use.

    Raises OSError if the folder cannot be created.
    """
    folder = target.with_name(f".{target.name}.{digest}{_SUFFIX}")
    folder.mkdir(exist_ok=True)
    with _locked(folder) as is_own:
        try:
            yield folder if is_own else None
        except BaseException as error:
            if is_own and (layers := len(list(folder.glob("*.safetensors")))):
                kept = "1 finished layer" if layers == 1 else f"{layers} finished layers"
                error.add_note(f"{folder} keeps {kept}; the same command continues after that")
            elif is_own:
                with suppress(OSError):
                    folder.rmdir()
            raise
        if is_own:
            shutil.rmtree(folder, ignore_errors=True)
    for other in folders(target):
        with _locked(other) as is_unused:
            if is_unused:
                shutil.rmtree(other, ignore_errors=True)


def folders(target: Path) -> list[Path]:
    """Returns the folders that keep finished layers for `target`, of all calibrations."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


@contextmanager
def _locked(folder: Path) -> Generator[bool]:
    """Locks a folder; yields False if another process has locked or removed it, and for links and files."""
    handle: int | None = None
    try:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        yield handle is not None and _lock(handle)
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
