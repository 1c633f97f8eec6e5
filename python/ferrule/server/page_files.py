"""The chat page's files, and the headers that let it run nothing but them."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

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
            # No text becomes HTML or code, whatever a script of the page may try.
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
"""`no-cache` asks each time whether a file has changed: a new version of ferrule is a new page."""


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page(directory: Path) -> StaticFiles:
    """The directory's files, with index.html at the root."""
    return _PageFiles(directory=directory, html=True, check_dir=False)
