"""`FileStore`: uploaded files and the outputs of batches, in a folder of bounded size."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Literal

from ferrule._engine.workers import WORKERS
from ferrule._validation import shown
from ferrule.server.batches.multipart import MultipartReader, Part
from ferrule.server.batches.protocol import BATCH, StoredFile
from ferrule.server.batches.records import SUFFIX, Records, storage_errors
from ferrule.server.errors import BAD_REQUEST, ApiError, unsupported
from ferrule.server.settings import ServerSettings

MAX_FILES = 10_000
MAX_NAME = 255
"""Maximum number of characters of a file's name."""
MAX_FIELD_BYTES = 1024
"""Maximum size of a field of the form other than the file, in bytes."""
NEW = ".part"
"""Suffix of a file that is being written."""
PIECE = 1 << 20
"""Bytes that are read at once."""


class FileStore:
    """Files by id. The constructor reads the folder and removes contents without a record."""

    def __init__(self, folder: Path, settings: ServerSettings) -> None:
        self._max_file_bytes = settings.max_file_bytes
        self._quota = settings.files_quota
        self.records = Records(folder, StoredFile, "file-")
        known = {f"{record.id}{suffix}" for record in self.records.all() for suffix in ("", SUFFIX)}
        for path in folder.glob("file-*"):
            if path.name not in known:
                path.unlink()
        self.used = sum(record.bytes for record in self.records.all())
        """Size of all files in bytes, with those that are being uploaded."""

    def path(self, record: StoredFile) -> Path:
        """Returns the path of a file's content."""
        return self.records.folder / record.id

    def new_path(self) -> Path:
        """Returns a path for the content of a file that `add` adds."""
        return self.records.folder / f"{self.records.new_id()}{NEW}"

    def check_room(self) -> None:
        """Raises ApiError if there is no room for one more file."""
        if len(self.records) >= MAX_FILES:
            message = f"the server stores at most {MAX_FILES} files; delete files"
            raise ApiError(BAD_REQUEST, message, code="files_full")
        self.check_bytes()

    def check_bytes(self, more: int = 0) -> None:
        """Raises ApiError if there is no room for `more` bytes."""
        if self.used + more > self._quota:
            message = f"files may take at most {self._quota} bytes (files_quota), which are used up; delete files"
            raise ApiError(BAD_REQUEST, message, code="files_full")

    async def upload(self, content_type: str | None, body: AsyncIterator[bytes]) -> StoredFile:
        """Stores the file of a form that is being received.

        Raises ApiError for an invalid form and at a limit.
        """
        reader = MultipartReader(content_type)
        self.check_room()
        form = _Form()
        new = self.new_path()
        with storage_errors():
            file = await WORKERS.run(_create, new)
        size = 0
        try:
            async for piece in body:
                for found in reader.feed(piece):
                    if isinstance(found, Part):
                        form.begin(found)
                    elif form.in_file:
                        size += len(found)
                        self.used += len(found)
                        if size > self._max_file_bytes:
                            message = f"file must have at most {self._max_file_bytes} bytes (max_file_bytes), got more"
                            raise ApiError(413, message, code="file_too_large", param="file")
                        self.check_bytes()
                        with storage_errors():
                            await WORKERS.run(file.write, found)
                    else:
                        form.add(found)
            reader.close()
            filename = form.filename_of_batch()
            with storage_errors():
                await WORKERS.run(_sync, file)
            return await self.add(new, filename, BATCH)
        finally:
            self.used -= size
            with contextlib.suppress(OSError):  # of a full disk, again
                file.close()
            new.unlink(missing_ok=True)

    async def add(self, new: Path, filename: str, purpose: Literal["batch", "batch_output"]) -> StoredFile:
        """Adds a file whose content is complete at a path that `new_path` returned."""
        record = StoredFile(
            id=new.name.removesuffix(NEW),
            bytes=new.stat().st_size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        self.used += record.bytes
        new.rename(self.path(record))
        await self.records.put(record.id, record)
        return record

    async def content(self, record: StoredFile) -> AsyncIterator[bytes]:
        """Opens a file; the returned iterator yields its content, also if it is deleted meanwhile."""
        file: BinaryIO = await WORKERS.run(self.path(record).open, "rb")

        async def pieces() -> AsyncIterator[bytes]:
            with file:
                while piece := await WORKERS.run(file.read, PIECE):
                    yield piece

        return pieces()

    async def delete(self, record: StoredFile) -> None:
        """Deletes a file."""
        self.used -= record.bytes
        await self.records.remove(record.id)
        await WORKERS.run(self.path(record).unlink, missing_ok=True)


class _Form:
    """Fields of an upload."""

    def __init__(self) -> None:
        self._fields: dict[str, bytes] = {}
        self._filename: str | None = None
        self._current = ""

    @property
    def in_file(self) -> bool:
        """Whether the current part is the file."""
        return self._current == "file"

    def begin(self, part: Part) -> None:
        """Begins the next part. Raises ApiError for a part that an upload does not have."""
        if part.name in self._fields or part.name == "file" == self._current:
            raise ApiError(BAD_REQUEST, f"{part.name} must be given once", code="invalid_value", param=part.name)
        if part.name.startswith("expires_after"):
            message = "expires_after is not supported: files are kept until they are deleted"
            raise unsupported("expires_after", message)
        if part.name not in ("file", "purpose"):
            message = f"unknown field {shown(part.name)}; the fields are file and purpose"
            raise ApiError(BAD_REQUEST, message, code="unknown_parameter", param=part.name[:MAX_NAME])
        self._current = part.name
        self._fields[part.name] = b""
        if self.in_file:
            self._filename = part.filename

    def add(self, content: bytes) -> None:
        """Adds content of a part that is not the file."""
        if len(self._fields[self._current]) + len(content) > MAX_FIELD_BYTES:
            message = f"{self._current} must have at most {MAX_FIELD_BYTES} bytes, got more"
            raise ApiError(BAD_REQUEST, message, code="invalid_value", param=self._current)
        self._fields[self._current] += content

    def filename_of_batch(self) -> str:
        """Returns the name of the file. Raises ApiError for an incomplete form or another purpose than `batch`."""
        for name in ("file", "purpose"):
            if name not in self._fields:
                raise ApiError(BAD_REQUEST, f"{name} is required", code="missing_required_parameter", param=name)
        purpose = self._fields["purpose"].decode(errors="replace")
        if purpose != BATCH:
            raise ApiError(
                BAD_REQUEST, f"purpose must be 'batch', got {shown(purpose)}", code="invalid_value", param="purpose"
            )
        name = self._filename
        if not name or len(name) > MAX_NAME:
            message = f"file must have a name of 1 to {MAX_NAME} characters, got {shown(name)}"
            raise ApiError(BAD_REQUEST, message, code="invalid_value", param="file")
        return name


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
