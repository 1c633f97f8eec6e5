"""Layers that an interrupted calibration has finished, in a folder beside its output."""

from __future__ import annotations

import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ferrule._loading.temporary import locked_directory

_SUFFIX = ".layers"


@contextmanager
def kept_layers(target: Path, digest: str) -> Generator[Path | None]:
    """Yields the folder that keeps the finished layers of a calibration until the output `target` is complete.

    `digest` identifies the calibration, in 16 hexadecimal digits. Yields None if another process uses the folder. An
    exception gets a note that names the folder, if it has finished layers. Without an exception, the folders of all
    calibrations for `target` are removed, except those that other processes use.

    Raises OSError if the folder cannot be created.
    """
    folder = target.with_name(f".{target.name}.{digest}{_SUFFIX}")
    folder.mkdir(exist_ok=True)
    with locked_directory(folder) as is_own:
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
    for other in folders(target):
        with locked_directory(other) as is_unused:
            if is_unused:
                shutil.rmtree(other, ignore_errors=True)


def folders(target: Path) -> list[Path]:
    """Returns the folders that keep finished layers for `target`, of all calibrations."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))
