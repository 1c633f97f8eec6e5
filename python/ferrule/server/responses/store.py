"""`ResponseStore`: responses in a SQLite file of bounded size.

Its methods block: they are called in worker threads.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule.errors import InvalidParameterError
from ferrule.server.errors import UNAVAILABLE, ApiError

APPLICATION_ID = 0x66727573
"""Mark of the file as one of this server (https://www.sqlite.org/pragma.html#pragma_application_id)."""
MAX_BYTES = 1 << 30
"""Maximum size of all stored responses, in bytes."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    ended INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    body BLOB NOT NULL,
    items BLOB NOT NULL,
    events BLOB
)
"""
INTERRUPTED = {"code": "interrupted", "message": "the server stopped before the response was finished"}


@dataclass(frozen=True)
class StoredResponse:
    """A stored response."""

    body: bytes
    """JSON of the response."""
    items: bytes
    """JSON list of the items that it answers: those of the responses before it, then the request's input."""
    events: bytes | None = None
    """Events of the stream of a background response that has ended."""


class ResponseStore:
    """Responses by id. The oldest ones that have ended are removed beyond `max_responses` and MAX_BYTES.

    The constructor marks responses as failed that an earlier server left unfinished. One process may use the file.

    Raises InvalidParameterError for a file that cannot be used.
    """

    def __init__(self, path: Path, max_responses: int) -> None:
        self._max_responses = max_responses
        self._lock = threading.Lock()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=0, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise InvalidParameterError("responses_db", str(path), f"a writable file ({error})") from error
        try:
            self._open()
        except (sqlite3.Error, ValueError) as error:
            self._db.close()
            requirement = f"a file of stored responses that no other server uses ({error})"
            raise InvalidParameterError("responses_db", str(path), requirement) from error

    def _open(self) -> None:
        (mark,) = self._db.execute("PRAGMA application_id").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if mark != APPLICATION_ID and tables:
            raise ValueError("it is a database of another program")
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "auto_vacuum = FULL",  # the file shrinks
            "secure_delete = ON",  # deleted text is overwritten
            "synchronous = NORMAL",
            f"application_id = {APPLICATION_ID}",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        with self._db:
            self._db.execute(SCHEMA)
            for number, body in self._db.execute("SELECT number, body FROM responses WHERE NOT ended").fetchall():
                failed = {**json.loads(body), "status": "failed", "error": INTERRUPTED}
                self._db.execute(
                    "UPDATE responses SET ended = 1, body = ? WHERE number = ?", (json.dumps(failed).encode(), number)
                )

    def put(self, response_id: str, response: StoredResponse, *, ended: bool) -> None:
        """Adds or replaces a response. Raises ApiError if it cannot be written."""
        events = response.events
        size = len(response.body) + len(response.items) + len(events or b"")
        with self._transaction() as db:
            db.execute(
                "INSERT INTO responses (id, ended, bytes, body, items, events) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET ended = excluded.ended, bytes = excluded.bytes, body = excluded.body, "
                "items = excluded.items, events = excluded.events",
                (response_id, ended, size, response.body, response.items, events),
            )
            count, total = db.execute("SELECT count(*), sum(bytes) FROM responses").fetchone()
            oldest = db.execute("SELECT number, bytes FROM responses WHERE ended ORDER BY number")
            while count > self._max_responses or total > MAX_BYTES:
                old: Any = oldest.fetchone()
                if old is None:
                    break
                db.execute("DELETE FROM responses WHERE number = ?", (old[0],))
                count, total = count - 1, total - old[1]

    def get(self, response_id: str) -> StoredResponse | None:
        """Returns a response; None if there is none."""
        with self._transaction() as db:
            found = db.execute("SELECT body, items, events FROM responses WHERE id = ?", (response_id,)).fetchone()
        return None if found is None else StoredResponse(*found)

    def delete(self, response_id: str) -> bool:
        """Deletes a response; returns whether it existed."""
        with self._transaction() as db:
            return db.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        try:
            with self._lock, self._db:
                yield self._db
        except sqlite3.Error as error:
            message = f"the file of stored responses cannot be used: {error}"
            raise ApiError(UNAVAILABLE, message, code="storage_unavailable") from error
