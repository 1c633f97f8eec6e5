"""Ollama's API, for programs that know no other; only where the settings say so."""

from ferrule.server.ollama.errors import error_body

__all__ = ["error_body"]
