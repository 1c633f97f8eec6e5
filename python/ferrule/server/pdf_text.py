"""POST /page/pdf-text: the text of a PDF file that a user attaches to a message in the chat page."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from ferrule.server.context import Context
from ferrule.server.errors import BAD_REQUEST, UNPROCESSABLE, ApiError

WORKER = Path(__file__).with_name("pdf_worker.py")
PROCESSES = 2
"""Maximum number of files that are read at once."""
SECONDS = 60.0
"""Maximum duration of reading a file, in seconds."""


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
    slots = asyncio.Semaphore(PROCESSES)
    if server.settings.page:

        @routes.post("/page/pdf-text", include_in_schema=False)
        async def pdf_text(request: Request) -> PdfText:
            """Returns the text of the PDF file that is the request's body."""
            data = await request.body()
            if not data.lstrip()[:5].startswith(b"%PDF-"):
                raise _invalid("it does not begin with %PDF-")
            async with slots:
                return await _extract(data)

    return routes


async def _extract(data: bytes) -> PdfText:
    """Reads a file in another process.

    Raises ApiError.
    """
    # -P: the folder of the program is not searched for modules.
    command = (sys.executable, "-P", str(WORKER))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
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
    if "error" in found:
        raise _invalid(found["error"])
    return PdfText(**found)


def _invalid(reason: str) -> ApiError:
    return ApiError(BAD_REQUEST, f"the PDF file cannot be read: {reason}", code="invalid_pdf")


def _too_complex() -> ApiError:
    message = "the PDF file cannot be read within 30 s of processor time, 60 s and 1 GiB of memory"
    return ApiError(UNPROCESSABLE, message, code="pdf_too_complex")
