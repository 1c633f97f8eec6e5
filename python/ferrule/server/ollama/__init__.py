"""Ollama's API, without management of models; the setting `ollama` enables it."""

from ferrule.server.ollama.errors import error_body

__all__ = ["error_body"]
