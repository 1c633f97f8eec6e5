"""From a model's name to its files: where they are, and what they say about the model."""

from ferrule.loading.model_files import ModelFiles, read_model_files
from ferrule.loading.resolve import EMBEDDED, find_model

__all__ = ["EMBEDDED", "ModelFiles", "find_model", "read_model_files"]
