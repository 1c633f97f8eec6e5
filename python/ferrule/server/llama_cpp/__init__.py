"""llama.cpp's own routes, for text, infilling and embeddings; those of its OpenAI API are in `openai`."""

from ferrule.server.llama_cpp.errors import error_body

PATHS = ("/completion", "/infill", "/embedding", "/props", "/slots")
"""Paths of the routes."""
__all__ = ["PATHS", "error_body"]
