"""Processors of images: one file for each family of models, and one line in PROCESSORS for each model type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ferrule._vision.processors.idefics3 import read_idefics3
from ferrule._vision.processors.processor import ProcessedImage, Processor

__all__ = ["PROCESSORS", "ProcessedImage", "Processor"]

PROCESSORS: Mapping[str, Callable[[Path], Processor]] = {
    "idefics3": read_idefics3,
    "smolvlm": read_idefics3,
}
"""Functions that read the processor of a model's directory, by the `model_type` of config.json.

They raise ConfigError, ModelFileError and ModelNotFoundError."""
