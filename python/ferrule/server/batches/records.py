"""`Records`: objects of an API, each a JSON file in a folder, with an index in memory."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from ferrule._engine.workers import WORKERS
from ferrule._validation import shown
from ferrule.server.errors import UNAVAILABLE, ApiError

T = TypeVar("T", bound=BaseModel)
SUFFIX = ".json"


class Records(Generic[T]):
    """Objects of one kind by id, in the order of their creation.

    A path is made from ids of the index only, so that no request can name a file outside the folder. `prefix` begins
    every id. The constructor reads the folder; objects that are not valid are left alone.
    """

    def __init__(self, folder: Path, kind: type[T], prefix: str) -> None:
        self.folder = folder
        self._prefix = prefix
        self._form = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{32}}")
        self._last = 0
        self._writing = asyncio.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: dict[str, T] = {}
        for path in folder.glob(f"*{SUFFIX}"):
            if self._form.fullmatch(path.stem):
                try:
                    found[path.stem] = kind.model_validate_json(path.read_bytes())
                except (ValidationError, OSError):
                    continue
        self._index = dict(sorted(found.items()))

    def __len__(self) -> int:
        return len(self._index)

    def new_id(self) -> str:
        """Returns an id that sorts after all others; its second half is random."""
        self._last = max(self._last + 1, time.time_ns())
        return f"{self._prefix}{self._last:016x}{secrets.token_hex(8)}"

    def all(self) -> Iterable[T]:
        """Yields all objects, the oldest first."""
        yield from tuple(self._index.values())

    def find(self, record_id: str) -> T:
        """Returns an object.

        Raises ApiError with status 404.
        """
        found = self._index.get(record_id)
        if found is None:
            kind = self._prefix.rstrip("-_")
            raise ApiError(
                404, f"no {kind} has the id {shown(record_id)}", code=f"{kind}_not_found", param=f"{kind}_id"
            )
        return found

    def page(
        self, after: str | None, limit: int, *, newest_first: bool, wanted: Callable[[T], bool] = lambda _: True
    ) -> tuple[list[T], bool]:
        """Returns at most `limit` objects that follow the id `after`, and whether there are more.

        `after` may be the id of an object that no longer exists.
        """
        ids = list(self._index)
        if newest_first:
            ids = ids[: bisect_left(ids, after)] if after is not None else ids
            ids.reverse()
        elif after is not None:
            ids = ids[bisect_right(ids, after) :]
        found = [record for record in map(self._index.__getitem__, ids) if wanted(record)]
        return found[:limit], len(found) > limit

    async def put(self, record_id: str, record: T) -> None:
        """Writes an object; the file is replaced atomically.

        Raises ApiError if it cannot be written.
        """
        self._index[record_id] = record
        async with self._writing:
            content = record.model_dump_json().encode()
            with storage_errors():
                await WORKERS.run(_write, self.folder / f"{record_id}{SUFFIX}", content)

    async def remove(self, record_id: str) -> None:
        """Removes an object of the index."""
        del self._index[record_id]
        await WORKERS.run((self.folder / f"{record_id}{SUFFIX}").unlink, missing_ok=True)


@contextmanager
def storage_errors() -> Generator[None]:
    """Converts an OSError, such as of a full disk, to an ApiError."""
    try:
        yield
    except OSError as error:
        message = f"files_dir cannot be written: {error.strerror}"
        raise ApiError(UNAVAILABLE, message, code="storage_unavailable") from error


def _write(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
