"""Bodies of type multipart/form-data (RFC 7578), split into parts while they arrive: a file is never held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from typing import Literal

from ferrule._validation import shown
from ferrule.server.errors import BAD_REQUEST, ApiError

MAX_HEADER_BYTES = 8 << 10
"""Maximum size of the headers of a part, and of what precedes the first part, in bytes."""
MAX_BOUNDARY = 70
"""Maximum length of a boundary (RFC 2046)."""


@dataclass(frozen=True)
class Part:
    """Start of a part; its content follows as bytes."""

    name: str
    """Name of the form's field."""
    filename: str | None
    """Name of the file; None for a field that is not a file."""


class MultipartReader:
    """Parser of a body; `content_type` is the header of the request.

    Raises ApiError for another type.
    """

    def __init__(self, content_type: str | None) -> None:
        header = Message()
        header["content-type"] = content_type or ""
        boundary = header.get_boundary() or ""
        if header.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY:
            message = f"Content-Type must be multipart/form-data with a boundary, got {shown(content_type)}"
            raise ApiError(BAD_REQUEST, message, code="invalid_type")
        self._delimiter = b"\r\n--" + boundary.encode(errors="replace")
        # The first delimiter may begin the body.
        self._buffer = bytearray(b"\r\n")
        self._state: Literal["preamble", "delimiter", "headers", "content", "end"] = "preamble"

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Yields the parts that begin in the next bytes of the body, and their contents.

        Raises ApiError for an invalid body.
        """
        self._buffer += data
        while True:
            match self._state:
                case "content":
                    content = self._content()
                    if content:
                        yield content
                    elif not self._pass_delimiter():
                        return
                case "preamble":
                    if not self._pass_delimiter():
                        self._check_headers(len(self._buffer))
                        return
                case "delimiter":
                    if not self._pass_line_end():
                        return
                case "headers":
                    at = self._buffer.find(b"\r\n\r\n")
                    self._check_headers(len(self._buffer) if at < 0 else at)
                    if at < 0:
                        return
                    part = _part(bytes(self._buffer[2:at]))
                    del self._buffer[: at + 4]
                    self._state = "content"
                    yield part
                case "end":  # what follows has no meaning
                    self._buffer.clear()
                    return

    def _content(self) -> bytes:
        """Takes what certainly belongs to the content: the last bytes may begin a delimiter."""
        at = self._buffer.find(self._delimiter)
        end = max(len(self._buffer) - len(self._delimiter) + 1, 0) if at < 0 else at
        content = bytes(self._buffer[:end])
        del self._buffer[:end]
        return content

    def _pass_delimiter(self) -> bool:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            return False
        self._check_headers(at)
        del self._buffer[: at + len(self._delimiter)]
        self._state = "delimiter"
        return True

    def _pass_line_end(self) -> bool:
        """Passes what follows a delimiter up to the line break, or the mark of the last one."""
        found = self._buffer.lstrip(b" \t")
        if len(found) < 2:
            self._check_headers(len(self._buffer))
            return False
        last = found.startswith(b"--")
        if not last and not found.startswith(b"\r\n"):
            raise _invalid("a boundary is not followed by a line break")
        self._state = "end" if last else "headers"
        self._buffer = found  # the line break stays, since a part may have no headers
        return True

    def _check_headers(self, size: int) -> None:
        if size > MAX_HEADER_BYTES:
            raise _invalid(f"{MAX_HEADER_BYTES} bytes have neither a boundary nor the end of a part's headers")

    def close(self) -> None:
        """Raises ApiError for a body without its last delimiter."""
        if self._state != "end":
            raise _invalid("it ends before its last boundary")


def _part(headers: bytes) -> Part:
    message = message_from_string(headers.decode(errors="replace"))
    disposition = "content-disposition"
    name = message.get_param("name", header=disposition)
    if message.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise _invalid("a part has no Content-Disposition: form-data with a name")
    return Part(name, message.get_filename())


def _invalid(reason: str) -> ApiError:
    return ApiError(BAD_REQUEST, f"request body is not valid multipart/form-data: {reason}", code="invalid_multipart")
