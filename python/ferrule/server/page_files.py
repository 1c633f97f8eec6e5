"""Files of the chat page, with headers that allow no scripts, styles or connections of other origins."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from ferrule.server.middleware.base import header, route_path

HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # No script of the page can turn text into HTML or code.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every file. With `no-cache` the browser revalidates, so that a new version of ferrule has a new page."""


class _File:
    """A file of the page, and the headers of its answers."""

    def __init__(self, path: Path) -> None:
        self.media_type = mimetypes.guess_type(path)[0] or "text/plain"
        self.content = b""
        self.headers = {**HEADERS, "ETag": ""}
        self._path = path
        self._version: tuple[int, int] | None = None

    def update(self) -> None:
        """Reads the file unless it has the time and size of the last time. Raises FileNotFoundError."""
        found = self._path.stat()
        version = (found.st_mtime_ns, found.st_size)
        if version != self._version:
            self.content = self._path.read_bytes()
            self.headers["ETag"] = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
            self._version = version


class Page:
    """ASGI application that serves the files of a directory, with index.html at the root.

    A view of the page requests more than sixty small files, so a file is read from the disk again only after it has
    changed. Other paths than those of the files are not found, which includes paths that lead out of the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, _File] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises HTTPException."""
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        file = self._find(route_path(scope).removeprefix("/") or "index.html")
        if header(scope, "if-none-match") == file.headers["ETag"]:
            response = Response(status_code=304, headers=file.headers)
        elif scope["method"] == "HEAD":
            headers = {**file.headers, "Content-Length": str(len(file.content))}
            response = Response(headers=headers, media_type=file.media_type)
        else:
            response = Response(file.content, headers=file.headers, media_type=file.media_type)
        await response(scope, receive, send)

    def _find(self, name: str) -> _File:
        if not self._files:
            paths = (path for path in self._directory.rglob("*") if path.is_file())
            self._files = {path.relative_to(self._directory).as_posix(): _File(path) for path in paths}
        try:
            file = self._files[name]
            file.update()
        except (KeyError, FileNotFoundError):
            raise HTTPException(404) from None
        return file
