"""POST /page/pdf-text: the text of a PDF file that a user attaches to a message in the chat page."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from ferrule.server.context import Context
from ferrule.server.errors import BAD_REQUEST, UNAVAILABLE, UNPROCESSABLE, ApiError
from ferrule.server.pdf_worker import CPU_SECONDS, MEMORY

WORKER = Path(__file__).with_name("pdf_worker.py")
PROCESSES = 2
"""Maximum number of files that are read at once."""
MAX_WAITING = 8
"""Maximum number of files that wait to be read."""
SECONDS = 60.0
"""Maximum duration of reading a file, in seconds."""
ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE"),
)
"""Environment variables of the process that reads a file; others, such as API keys, are no concern of it."""


class PdfText(BaseModel):
    """Text of a PDF file."""

    text: str
    """Text of the pages, with an empty line between them; empty for a file of pictures."""
    pages: int
    """Number of pages of the file."""
    truncated: bool
    """Whether the text ends before the file does."""


def router(server: Context) -> APIRouter:
    """Creates the route; without the chat page there is none."""
    routes = APIRouter()
    readers = _Readers()
    if server.settings.page:

        @routes.post("/page/pdf-text", include_in_schema=False)
        async def pdf_text(request: Request) -> PdfText:
            """Returns the text of the PDF file that is the request's body."""
            data = await request.body()
            if not data.lstrip()[:5].startswith(b"%PDF-"):
                raise _invalid("it does not begin with %PDF-")
            return await readers.extract(data)

    return routes


class _Readers:
    """Processes that read files, with a bounded queue."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PROCESSES)
        self._waiting = 0

    async def extract(self, data: bytes) -> PdfText:
        """Reads a file once it is its turn.

        Raises ApiError.
        """
        if self._slots.locked() and self._waiting >= MAX_WAITING:
            message = f"the queue of PDF files is full ({self._waiting} files, limit {MAX_WAITING})"
            raise ApiError(UNAVAILABLE, message, code="queue_full")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            return await _extract(data)
        finally:
            self._slots.release()


async def _extract(data: bytes) -> PdfText:
    """Reads a file in another process.

    Raises ApiError.
    """
    # -P: the folder of the program is not searched for modules.
    command = (sys.executable, "-P", str(WORKER))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(data), SECONDS)
    except TimeoutError:
        raise _too_complex() from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise _too_complex()
    found = json.loads(output)
    if "missing" in found:
        message = f"PDF files cannot be read, because pypdf cannot be imported: {found['missing']}; pip install pypdf"
        raise ApiError(500, message, code="missing_dependency")
    if "error" in found:
        raise _invalid(found["error"])
    return PdfText(**found)


def _invalid(reason: str) -> ApiError:
    return ApiError(BAD_REQUEST, f"the PDF file cannot be read: {reason}", code="invalid_pdf")


def _too_complex() -> ApiError:
    limits = f"{CPU_SECONDS} s of processor time, {SECONDS:.0f} s in all, {MEMORY >> 30} GiB of memory"
    message = f"reading the PDF file takes more than one of the limits: {limits}"
    return ApiError(UNPROCESSABLE, message, code="pdf_too_complex")
