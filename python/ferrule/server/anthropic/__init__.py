"""Anthropic's Messages API."""

from ferrule.server.anthropic.errors import error_body

__all__ = ["error_body"]
