"""Catalogue of short names: `qwen3:0.6b` stands for a file of a repository, of packages on PyPI, or for a local path.

The file `models/catalogue.toml` ships with ferrule. Users add and replace entries in `ferrule/models.toml` in
$XDG_CONFIG_HOME or ~/.config. docs/models.md describes the fields.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from ferrule.archs.config import Config
from ferrule.archs.files import read_file
from ferrule.errors import ConfigError, ModelFileError, ModelNotFoundError

SHIPPED = Path(__file__).parent.parent / "models" / "catalogue.toml"
LATEST = ":latest"
"""Suffix that selects the default of a family, as in Ollama."""
MAX_BYTES = 1 << 50
"""Largest size of a file, in bytes."""
MAX_PACKAGES = 64

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(:[a-z0-9][a-z0-9._-]*)?", re.ASCII)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SHORT = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<file>[\w./-]+)", re.ASCII)
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9._-]*", re.ASCII | re.IGNORECASE)
_VERSION = re.compile(r"[0-9][0-9a-z.+!-]*", re.ASCII)
_FILE = re.compile(r"[\w.+-][\w.+ -]*(/[\w.+-][\w.+ -]*)*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SOURCES = ("repository", "packages", "path")
_FIELDS = {"title", "license", "file", "bytes", "sha256", "revision", *_SOURCES}
_PACKAGE_FIELDS = {"name", "version", "bytes", "sha256", "member"}


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI that has a model, or one part of it."""

    name: str
    version: str
    bytes: int
    """Size of the wheel."""
    sha256: str
    member: str
    """Path of the file within the wheel."""


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue, with one source: a repository, packages or a local path."""

    name: str
    title: str = ""
    license: str = ""
    file: str | None = None
    """File of the repository, or its quantization; None: the whole repository. Name of the file of packages."""
    bytes: int | None = None
    """Size of the file; None if unknown."""
    sha256: str | None = None
    """SHA-256 of the file in hexadecimal; None if unknown."""
    repository: str | None = None
    revision: str | None = None
    packages: tuple[Package, ...] = ()
    """Wheels whose members, joined in this order, are the file."""
    path: str | None = None

    @property
    def source(self) -> str:
        """Name of the repository, the first package or the path that the model comes from."""
        if self.packages:
            return f"PyPI: {self.packages[0].name}"
        return self.repository or self.path or ""

    @property
    def download_bytes(self) -> int | None:
        """Number of bytes that a download transfers; None if unknown."""
        return sum(package.bytes for package in self.packages) or self.bytes


def user_file() -> Path:
    """Returns the path of the user's entries, which may not exist."""
    home = os.environ.get("XDG_CONFIG_HOME", "") or os.path.expanduser("~/.config")  # noqa: PTH111  # never raises
    return Path(home) / "ferrule" / "models.toml"


def catalogue() -> dict[str, Entry]:
    """Returns all entries by name; those of the user come first and replace those that ship with ferrule.

    Raises ConfigError, ModelFileError.
    """
    own: dict[str, Entry] = {}
    path = user_file()
    if (changed := _mtime(path)) is not None:
        own = _read(path, changed)
    return own | {name: entry for name, entry in _shipped().items() if name not in own}


def find_entry(name: str) -> Entry | None:
    """Returns the entry with a name, or the first one of a family (`qwen3`, `qwen3:latest`); None without one.

    Names are case-insensitive. The path of an entry may be the name of another one.

    Raises ConfigError, ModelFileError for an invalid file of the user.
    """
    found = _named(name)
    passed: list[str] = []
    while found is not None and found.path is not None and not os.path.exists(found.path):  # noqa: PTH110  # never raises
        passed.append(found.name)
        following = _named(found.path)
        if following is None:
            break
        if following.name in passed:
            raise ConfigError(f"{user_file()}: {' -> '.join([*passed, following.name])} lead back to the first one")
        found = following
    return found


def _named(name: str) -> Entry | None:
    wanted = name.lower().removesuffix(LATEST)
    if _NAME.fullmatch(wanted) is None:
        return None
    entries = catalogue()
    # A user's entry does not become the default of a family that ships with ferrule.
    family = [each for each in (*_shipped(), *entries) if each.partition(":")[0] == wanted]
    return entries.get(wanted) or (entries[family[0]] if family else None)


def similar_names(name: str, count: int = 3) -> list[str]:
    """Returns the names of the catalogue that are most similar to a misspelled one, at most `count`."""
    entries = catalogue()
    wanted = name.lower()
    names = {each: each for each in entries} | {each.partition(":")[0]: each for each in reversed(entries)}
    near = get_close_matches(wanted, names, count, cutoff=0.7)
    family = [each for each in entries if each.partition(":")[0] == wanted.partition(":")[0]]
    return list(dict.fromkeys([*family, *(names[each] for each in near)]))[:count]


def _shipped() -> dict[str, Entry]:
    return _read(SHIPPED, _mtime(SHIPPED))


def _mtime(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


@lru_cache(maxsize=4)
def _read(path: Path, _mtime: int | None) -> dict[str, Entry]:
    """Reads a file of entries, once for each time of change."""
    try:
        values = tomllib.loads(read_file(path).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except ModelNotFoundError as error:  # removed meanwhile
        raise ModelFileError(str(error)) from None
    return {name: _entry(Config(values, path), name) for name in values}


def _entry(values: Config, name: str) -> Entry:
    if _NAME.fullmatch(name) is None:
        limit = "lower case letters, digits, '.', '_' and '-', with an optional tag after one colon"
        raise ConfigError(f"{values.file}: the name of an entry must be {limit}, got {name!r}")
    if isinstance(short := values.values[name], str):  # a user's short form: org/repo, org/repo:quantization or a path
        if found := _SHORT.fullmatch(short):
            return Entry(name, repository=found["repository"], file=found["file"])
        if _REPOSITORY.fullmatch(short):
            return Entry(name, repository=short)
        if not short:
            raise values.error(name, "org/repo, org/repo:quantization or a path")
        return Entry(name, path=short)
    if not isinstance(short, dict):
        raise values.error(name, "a table, or a string with a repository or a path")
    table = values.inner(name)
    _refuse_unknown(table, _FIELDS)
    sources = [source for source in _SOURCES if source in table]
    if len(sources) != 1:
        found = " and ".join(sources) or "none"
        raise ConfigError(f"{values.file}: {name} must have one of {', '.join(_SOURCES)}, got {found}")
    packages = _packages(table)
    return Entry(
        name,
        table.text("title", default=""),
        table.text("license", default=""),
        _matching(table, "file", _FILE, "a relative path") if packages or "file" in table else None,
        table.integer("bytes", high=MAX_BYTES) if packages or "bytes" in table else None,
        _matching(table, "sha256", _SHA256, "64 hexadecimal digits") if packages or "sha256" in table else None,
        _matching(table, "repository", _REPOSITORY, "org/repo") if "repository" in table else None,
        table.text("revision") if "revision" in table else None,
        packages,
        table.text("path") if "path" in table else None,
    )


def _packages(table: Config) -> tuple[Package, ...]:
    values: object = table.values.get("packages")
    if values is None:
        return ()
    items = cast("list[object]", values) if isinstance(values, list) else []
    if not 1 <= len(items) <= MAX_PACKAGES or not all(isinstance(item, dict) for item in items):
        raise table.error("packages", f"a list of 1 to {MAX_PACKAGES} tables")
    configs = [
        Config(cast("dict[str, Any]", item), table.file, f"{table.path}packages[{index}].")
        for index, item in enumerate(items)
    ]
    return tuple(_package(each) for each in configs)


def _package(values: Config) -> Package:
    _refuse_unknown(values, _PACKAGE_FIELDS)
    return Package(
        _matching(values, "name", _PACKAGE, "the name of a package"),
        _matching(values, "version", _VERSION, "a version"),
        values.integer("bytes", high=MAX_BYTES),
        _matching(values, "sha256", _SHA256, "64 hexadecimal digits"),
        _matching(values, "member", _FILE, "a relative path"),
    )


def _refuse_unknown(values: Config, known: set[str]) -> None:
    for field in values.values:
        if field not in known:
            near = get_close_matches(field, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{values.file}: {values.path}{field} is not a field, which are {_listed(known)}{hint}")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _matching(values: Config, field: str, pattern: re.Pattern[str], limit: str) -> str:
    text = values.values.get(field)
    if not isinstance(text, str) or pattern.fullmatch(text) is None or ".." in text.split("/"):
        raise values.error(field, limit)
    return text
