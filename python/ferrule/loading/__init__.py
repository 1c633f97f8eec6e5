"""From the name of a model or an adapter to its files: where they are, and what they say about it."""

from ferrule.loading.adapter_files import AdapterFiles, read_adapter_files
from ferrule.loading.model_files import ModelFiles, read_model_files
from ferrule.loading.resolve import EMBEDDED, find_adapter, find_model

__all__ = [
    "EMBEDDED",
    "AdapterFiles",
    "ModelFiles",
    "find_adapter",
    "find_model",
    "read_adapter_files",
    "read_model_files",
]
