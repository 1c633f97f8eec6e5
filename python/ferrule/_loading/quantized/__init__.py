"""Quantized checkpoints: one file and one line in METHODS for each quantization method.

The configuration describes the codes and their layout. Lists of excluded modules are ignored, because the tensors show
which modules are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ferrule._loading.quantized.awq import awq
from ferrule._loading.quantized.bitsandbytes import bitsandbytes
from ferrule._loading.quantized.compressed_tensors import compressed_tensors
from ferrule._loading.quantized.fp8 import fp8
from ferrule._loading.quantized.gptq import gptq
from ferrule._loading.quantized.mxfp4 import mxfp4
from ferrule._loading.quantized.words import conversion_words, stored_words
from ferrule.archs.config import Config
from ferrule.archs.spec import StoredAs

__all__ = ["METHODS", "conversion_words", "read_stored_as", "stored_words"]

METHODS: Mapping[str, Callable[[Config], StoredAs]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
}
"""Methods by `quantization_config.quant_method`."""

FIELDS = ("quantization_config", "compression_config")
"""Fields of config.json; the second is the first name of compressed-tensors."""

FILES = (("quantize_config.json", "bits", gptq), ("quant_config.json", "w_bit", awq))
"""Separate configuration files of AutoGPTQ and AutoAWQ, each with a field that identifies it."""


def read_stored_as(config: Config, directory: Path) -> StoredAs | None:
    """Reads the quantization of a checkpoint; None if it is not quantized.

    Raises ConfigError, UnsupportedModelError, ModelFileError.
    """
    for holder in (config, config.inner("text_config")):
        for field in FIELDS:
            if field in holder:
                return _read(holder.inner(field))
    for name, field, read in FILES:
        file = Config.read_optional(directory / name)
        if field in file:
            return read(file)
    return None


def _read(config: Config) -> StoredAs:
    # Early configurations of bitsandbytes lack quant_method.
    unnamed = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & config.values.keys() else None
    method = config.text("quant_method", default=unnamed)
    if method not in METHODS:
        raise config.unsupported("quant_method", f"one of {', '.join(METHODS)}")
    return METHODS[method](config)
