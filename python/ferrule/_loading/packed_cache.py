"""The directory of packed weights: what a first load makes, so that the next ones map it and answer at once.

A packed file is named after its model, its quantization and a digest of everything that it was made from, so that it
is found again only where it would come out the same. The directory holds so many bytes; beyond them the files that
were not used for longest go. What is mapped stays readable when its file goes, to its last user.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ferrule._loading.gguf_files import models_in
from ferrule._validation import shown
from ferrule.errors import FerruleError, InvalidParameterError, ModelWriteError

DIRECTORY = "FERRULE_CACHE"
"""The variable that names the directory above; otherwise it is `ferrule` in $XDG_CACHE_HOME or ~/.cache."""
LIMIT = "FERRULE_PACKED_CACHE_LIMIT"
"""The variable for the bytes that packed files may take."""
DEFAULT_LIMIT = 100 << 30
SUFFIX = ".safetensors"
HALF_WRITTEN = ".tmp"
ABANDONED = 10.0
"""Seconds after which a file or a directory that nobody has locked belongs to a process that was killed."""

_HEADER = 1 << 20
"""Bytes of a file that tell it from others of its name, size and time: with safetensors, its header or most of it."""

_held: Counter[Path] = Counter()
"""How many models of this process have a file open."""


def hold(path: Path) -> None:
    """Notes that a model has a file open, so that this process does not remove it."""
    _held[path] += 1


def release(path: Path) -> None:
    """Notes that a model has closed it."""
    _held[path] -= 1
    if _held[path] <= 0:
        del _held[path]


@dataclass(frozen=True)
class PackedEntry:
    """A file of the cache."""

    name: str
    path: Path
    model: str
    """What it was packed from."""
    quantization: str
    bytes: int
    last_used: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class PackedCache:
    """Packed files in a directory, which need not be there yet."""

    directory: Path
    limit: int
    """Bytes."""

    @classmethod
    def open(cls, limit: int | None = None) -> PackedCache:
        """The cache that the environment names; `limit` goes before what that says.

        Raises InvalidParameterError for a limit that is no number of bytes.
        """
        if limit is None:
            text = os.environ.get(LIMIT, "") or str(DEFAULT_LIMIT)
            if not (text.isascii() and text.isdigit()):
                raise InvalidParameterError(f"{LIMIT} is {shown(text)}; it must be a whole number of bytes")
            limit = int(text)
        home = os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache")  # noqa: PTH111  # never raises
        directory = os.environ.get(DIRECTORY, "") or os.path.join(home, "ferrule")  # noqa: PTH118
        return cls(Path(directory).absolute() / "packed", limit)

    def path_of(self, model: str, quantization: str, digest: str) -> Path:
        """Where a model's packed file lies or would lie; `model` is a repository or an absolute path."""
        name = Path(model).name if Path(model).is_absolute() else model
        readable = re.sub(r"[^\w.-]+", "--", name, flags=re.ASCII).strip("-.")[-80:]
        return self.directory / f"{readable or 'model'}-{quantization}-{digest}{SUFFIX}"

    def touch(self, path: Path) -> None:
        """Notes that a file is used now."""
        try:
            os.utime(path)
        except OSError:  # a directory that cannot be written to
            return

    def entries(self) -> list[PackedEntry]:
        """What is there, what was used last first."""
        entries = [_entry(path) for path in self._files()]
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.last_used)

    def remove(self, entries: Iterable[PackedEntry]) -> None:
        """Removes files; one that is gone already is as well. Raises OSError."""
        for entry in entries:
            entry.path.unlink(missing_ok=True)

    def remove_abandoned(self) -> int:
        """Removes what killed processes left half written; how many files. Raises OSError."""
        removed = 0
        for path in self._files(half_written=True):
            try:
                if time.time() - path.stat().st_mtime < ABANDONED:
                    continue
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by whoever still writes it
                    path.unlink()
            except (FileNotFoundError, BlockingIOError):
                continue
            removed += 1
        return removed

    def prepare(self, wanted: int) -> None:
        """Makes the directory, and room in it for so many bytes more: what was not used for longest goes.

        Files that this process has opened stay. Raises ModelWriteError where there is no room, or can be no directory.
        """
        if not self._make_room(wanted):
            raise ModelWriteError(
                f"{self.directory}: a packed file of {wanted} bytes does not fit beside those in use; "
                f"the limit is {self.limit} (packed_cache_limit)"
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelWriteError(f"{self.directory}: cannot be made: {error.strerror}") from error

    def _make_room(self, wanted: int) -> bool:
        files: list[tuple[float, int, Path]] = []
        for path in self._files():
            try:
                stat = path.stat()
            except OSError:  # another process removed it
                continue
            files.append((stat.st_mtime, stat.st_size, path))
        half_written = sum(path.stat().st_size for path in self._files(half_written=True) if path.exists())
        held = half_written + sum(size for _, size, _ in files)
        if wanted + half_written + sum(size for _, size, path in files if path in _held) > self.limit:
            return False
        for _, size, path in sorted(files):
            if held + wanted <= self.limit:
                break
            if path in _held:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return False
            held -= size
        return held + wanted <= self.limit

    def _files(self, *, half_written: bool = False) -> list[Path]:
        """Packed files, or those that are not whole yet."""
        suffix = HALF_WRITTEN if half_written else SUFFIX
        try:
            return [
                path
                for path in self.directory.iterdir()
                if path.suffix == suffix and path.name.startswith(".") == half_written
            ]
        except OSError:  # not there, or not to be read
            return []


def source_digest(path: Path, spec: str, quantization: str) -> str:
    """Names what a packed file is made from: the weights' files, the spec, the quantization and ferrule itself."""
    from ferrule import _native

    versions = (_native.version, str(_native.layout_version), str(_native.arithmetic_version))
    digest = hashlib.blake2b(digest_size=8)
    for text in (*versions, quantization, spec):
        digest.update(f"{len(text)} {text}".encode())
    for each in weight_files(path):
        real = each.resolve()
        try:
            stat = real.stat()
            with real.open("rb") as file:
                header = hashlib.blake2b(file.read(_HEADER)).hexdigest()
            state = f"{stat.st_size} {stat.st_mtime_ns} {header}"
        except OSError:  # no file, or not ours: a load that needs it says so
            state = "unreadable"
        digest.update(f"{real} {state}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def weight_files(path: Path) -> list[Path]:
    """The files of a model's weights: of a directory, and of the folders in it; or of a GGUF file, all of its parts."""
    if path.is_dir():
        return sorted([*path.glob("*.safetensors"), *path.glob("*/*.safetensors")])
    models = models_in(file.name for file in path.parent.iterdir())
    return [path.with_name(part) for parts in models.values() if path.name in parts for part in parts]


def weight_bytes(path: Path) -> int:
    """Bytes of these files; a link to nowhere has none."""
    return sum(file.stat().st_size for file in weight_files(path) if file.exists())


def _entry(path: Path) -> PackedEntry | None:
    from ferrule import _native

    try:
        stat = path.stat()
    except OSError:
        return None
    try:
        said: dict[str, object] = json.loads(_native.packed_metadata(os.fspath(path))[0])
    except FerruleError:  # of another version, or damaged: it takes room all the same
        said: dict[str, object] = {}
    model, quantization = (str(said.get(key, "?")) for key in ("model", "quantization"))
    return PackedEntry(path.name.removesuffix(SUFFIX), path, model, quantization, stat.st_size, stat.st_mtime)


def age_text(seconds: float) -> str:
    """How long ago a time was, for people."""
    passed = max(time.time() - seconds, 0)
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if passed >= size:
            count = int(passed // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
