"""Errors in Ollama's form, `{"error": message}`."""

from __future__ import annotations

from typing import Any

from ferrule.server.errors import ApiError


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the error body."""
    return {"error": error.detail}
