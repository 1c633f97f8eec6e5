"""Conversion of a checkpoint to GGUF by the tests' converter, and quantization by llama.cpp.

`python -m adapters.gguf_file CHECKPOINT DIRECTORY` writes a file of each type.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import llama_cpp

from adapters.gguf_source import bf16_file, finished

FILE_TYPES = {
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "IQ4_NL": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "Q4_K_S": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def quantized(checkpoint: Path, work: Path, name: str, threads: int) -> Path:
    """Returns the GGUF file of a format, which is created unless it exists."""
    if name not in FILE_TYPES:
        raise ValueError(f"format is {name!r}; it must be one of {', '.join(FILE_TYPES)}")
    source = bf16_file(checkpoint, work)

    def quantize(file: Path) -> None:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[name]
        params.nthread = threads
        if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), params) != 0:
            raise RuntimeError(f"llama.cpp could not quantize {source} to {name}")

    return finished(work / f"{name}.gguf", quantize)


def main() -> None:
    """Write every type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in FILE_TYPES:
        print(quantized(arguments.checkpoint, arguments.directory, name, os.cpu_count() or 1))


if __name__ == "__main__":
    main()
