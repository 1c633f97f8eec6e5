"""From a model's name to its files: where they are, and what they say about the model."""

from ferrule.loading.model_files import ModelFiles, has_weights, read_model_files
from ferrule.loading.resolve import EMBEDDED, find_model, is_repository

__all__ = ["EMBEDDED", "ModelFiles", "find_model", "has_weights", "is_repository", "read_model_files"]
