"""Cache of packed weights: the first load writes a file, and later loads map it.

The name of a packed file consists of the model, the quantization and a digest of everything that affects its contents.
The size of the cache is limited; beyond the limit the least recently used files are removed. A mapped file stays
readable after its removal.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ferrule._loading.cache_home import cache_home
from ferrule._loading.gguf_files import models_in
from ferrule._loading.lock_file import is_at, locked
from ferrule._loading.temporary import ABANDONED
from ferrule.errors import FerruleError, InvalidParameterError, ModelWriteError

LIMIT = "FERRULE_PACKED_CACHE_LIMIT"
"""Environment variable with the limit in bytes."""
DEFAULT_LIMIT = 100 << 30
SUFFIX = ".safetensors"
PARTIAL = ".tmp"

_HEADER = 1 << 20
"""Number of bytes at the start of a weight file that are digested: usually the whole safetensors header."""

_held: Counter[Path] = Counter()
"""Number of models in this process that have a file open, by path."""
UNKNOWN = "?"
"""Model and quantization of a file that cannot be read."""


def hold(path: Path) -> None:
    """Marks a file as in use by a model, so that this process does not remove it."""
    _held[path] += 1


def release(path: Path) -> None:
    """Marks a file as closed by a model."""
    _held[path] -= 1
    if _held[path] <= 0:
        del _held[path]


def packed_directory() -> Path:
    """Returns the directory of packed files, which the environment variables describe."""
    return cache_home() / "packed"


@dataclass(frozen=True)
class PackedEntry:
    """A packed file in the cache."""

    name: str
    path: Path
    model: str
    """Source model."""
    quantization: str
    bytes: int
    last_used: float
    """Time of last use in seconds since 1970."""


@dataclass(frozen=True)
class PackedCache:
    """Cache of packed files in a directory, which is created on first use."""

    directory: Path
    limit: int
    """Limit in bytes."""

    @classmethod
    def open(cls, limit: int | None = None) -> PackedCache:
        """Returns the cache that the environment variables describe; `limit` overrides their limit.

        Raises InvalidParameterError for a limit that is not a number of bytes.
        """
        if limit is None:
            text = os.environ.get(LIMIT, "") or str(DEFAULT_LIMIT)
            if not (text.isascii() and text.isdigit()):
                raise InvalidParameterError(LIMIT, text, "a number of bytes")
            limit = int(text)
        return cls(packed_directory(), limit)

    def path_of(self, model: str, quantization: str, digest: str) -> Path:
        """Returns the path of a model's packed file; `model` is a repository or an absolute path."""
        name = Path(model).name if Path(model).is_absolute() else model
        readable = re.sub(r"[^\w.-]+", "--", name, flags=re.ASCII).strip("-.")[-80:]
        return self.directory / f"{readable or 'model'}-{quantization}-{digest}{SUFFIX}"

    def touch(self, path: Path) -> None:
        """Sets the time of last use to now."""
        try:
            os.utime(path)
        except OSError:  # a read-only directory
            return

    def entries(self) -> list[PackedEntry]:
        """Returns the packed files, most recently used first."""
        entries = [_entry(path) for path in self._files()]
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.last_used)

    def remove(self, entries: Iterable[PackedEntry]) -> None:
        """Removes packed files; missing ones are ignored. Raises OSError."""
        for entry in entries:
            entry.path.unlink(missing_ok=True)

    def remove_abandoned(self) -> int:
        """Removes partial files of killed processes and returns their number. Raises OSError."""
        removed = 0
        for path in self._files(partial=True):
            try:
                if time.time() - path.stat().st_mtime < ABANDONED:
                    continue
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # locked while it is written
                    if not is_at(file, path):  # its process has completed it, and another one writes the next
                        continue
                    path.unlink()
            except (FileNotFoundError, BlockingIOError):
                continue
            removed += 1
        return removed

    @contextmanager
    def writing(self, path: Path) -> Generator[None]:
        """Keeps other processes from writing a packed file; waits first until none of them writes it.

        A process that has waited may find the file complete. In a directory that is not writable, and on a file system
        without locks, there is no wait, and each process writes the file as a whole.

        Raises ModelWriteError if the directory does not exist and cannot be created.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelWriteError(f"{self.directory}: cannot be created: {error.strerror}") from error
        # The lock file of a killed process is removed like its partial file.
        with locked(path.with_name(f".{path.name}.lock{PARTIAL}"), f"packs weights into {path}"):
            yield

    def evict(self, wanted: int) -> None:
        """Removes least recently used files until `wanted` more bytes fit. Files in use by this process stay.

        Raises ModelWriteError if there is no room.
        """
        if not self._evict(wanted):
            raise ModelWriteError(
                f"{self.directory}: a packed file of {wanted} bytes does not fit beside the files in use; "
                f"the limit is {self.limit} (packed_cache_limit)"
            )

    def _evict(self, wanted: int) -> bool:
        files: list[tuple[float, int, Path]] = []
        for path in self._files():
            try:
                stat = path.stat()
            except OSError:  # another process removed it
                continue
            files.append((stat.st_mtime, stat.st_size, path))
        partial = 0
        for path in self._files(partial=True):
            with suppress(FileNotFoundError):  # it is complete or abandoned by now
                partial += path.stat().st_size
        held = partial + sum(size for _, size, _ in files)
        if wanted + partial + sum(size for _, size, path in files if path in _held) > self.limit:
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

    def _files(self, *, partial: bool = False) -> list[Path]:
        """Returns the packed files, or the partial files."""
        suffix = PARTIAL if partial else SUFFIX
        try:
            return [
                path
                for path in self.directory.iterdir()
                if path.suffix == suffix and path.name.startswith(".") == partial
            ]
        except OSError:  # missing or unreadable
            return []


def source_digest(path: Path, spec: str, quantization: str) -> str:
    """Returns the digest of everything that determines a packed file: weight files, spec, quantization, versions."""
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
        except OSError:  # missing or unreadable; the load reports it
            state = "unreadable"
        digest.update(f"{real} {state}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def weight_files(path: Path) -> list[Path]:
    """Returns the weight files of a directory and its subfolders, or all parts of a GGUF file."""
    if path.is_dir():
        return sorted([*path.glob("*.safetensors"), *path.glob("*/*.safetensors")])
    models = models_in(file.name for file in path.parent.iterdir())
    return [path.with_name(part) for parts in models.values() if path.name in parts for part in parts]


def weight_bytes(path: Path) -> int:
    """Returns the size of a model's weight files in bytes."""
    return sum(file.stat().st_size for file in weight_files(path) if file.exists())


def _entry(path: Path) -> PackedEntry | None:
    from ferrule import _native

    try:
        stat = path.stat()
    except OSError:
        return None
    try:
        metadata = _native.PackedFile(os.fspath(path)).metadata
    except FerruleError:  # a damaged file or one of another version, which still takes space
        metadata = {}
    model, quantization = (metadata.get(key, UNKNOWN) for key in ("model", "quantization"))
    return PackedEntry(path.name.removesuffix(SUFFIX), path, model, quantization, stat.st_size, stat.st_mtime)


def age_text(seconds: float) -> str:
    """Formats the time since a point in time: `3 days ago`."""
    passed = max(time.time() - seconds, 0)
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if passed >= size:
            count = int(passed // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
