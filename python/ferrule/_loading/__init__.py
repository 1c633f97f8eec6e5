"""Finds the files of a model or an adapter by name, and reads their configuration."""

from ferrule._loading.adapter_files import AdapterFiles, read_adapter_files
from ferrule._loading.model_files import PACKED_METHOD, WEIGHTS, ModelFiles, has_weights, read_model_files
from ferrule._loading.resolve import EMBEDDED, find_adapter, find_model, is_remote

__all__ = [
    "EMBEDDED",
    "PACKED_METHOD",
    "WEIGHTS",
    "AdapterFiles",
    "ModelFiles",
    "find_adapter",
    "find_model",
    "has_weights",
    "is_remote",
    "read_adapter_files",
    "read_model_files",
]
