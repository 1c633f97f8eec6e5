"""The routes below /api."""

from __future__ import annotations

from fastapi import APIRouter

from ferrule.server.context import Context


def router(server: Context) -> APIRouter:
    """The routes."""
    return APIRouter()
