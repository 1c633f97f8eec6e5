"""ik_llama.cpp through its C interface: `-rtr` after the format repacks the matrices while loading (`Q4_0-rtr`)."""

from __future__ import annotations

import ctypes
import sys
from ctypes import CDLL, c_bool, c_char_p, c_int, c_int8, c_int32, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from adapters.batches import BATCH, Row, timed
from adapters.gguf_sizes import loaded
from adapters.gguf_source import bf16_file, finished
from adapters.interface import Job, Timing

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_S": 14, "Q4_K_M": 15}
"""`general.file_type` of the formats whose files have only tensor types that the gguf package knows."""
KV_TYPES = {"f16": (1, 16.0), "q8_0": (8, 8.5)}
"""Cache types of ggml, and the number of bits of an element."""
REPACKED = "-rtr"


BUILD = Path(sys.prefix) / "build"
"""Directory where `install` builds the library, and writes the commit of its source."""


def library() -> CDLL:
    """The library that `install` builds, with the types of the functions that are used here."""
    found = CDLL(str(BUILD / "libpeer.so"))
    functions: dict[str, tuple[Any, list[Any]]] = {
        "llama_backend_init": (None, []),
        "llama_get_logits_ith": (c_void_p, [c_void_p, c_int32]),
        "llama_kv_cache_clear": (None, [c_void_p]),
        "llama_n_vocab": (c_int32, [c_void_p]),
        "llama_print_system_info": (c_char_p, []),
        "peer_context": (c_void_p, [c_void_p, c_int, c_int, c_int, c_int, c_int, c_bool]),
        "peer_decode": (c_int, [c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p]),
        "peer_model": (c_void_p, [c_char_p, c_bool]),
        "peer_quantize": (c_uint, [c_char_p, c_char_p, c_int, c_int]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def quantized(library: CDLL, job: Job, name: str) -> Path:
    """Returns the GGUF file of a format, which ik_llama.cpp quantizes unless it exists."""
    if name not in FILE_TYPES:
        raise ValueError(f"format is {name!r}; it must be one of {', '.join(FILE_TYPES)}, or one with {REPACKED}")
    source = bf16_file(job.model, job.work)

    def quantize(file: Path) -> None:
        if library.peer_quantize(str(source).encode(), str(file).encode(), FILE_TYPES[name], job.threads) != 0:
            raise RuntimeError(f"ik_llama.cpp could not quantize {source} to {name}")

    return finished(job.work / f"ik-{name}.gguf", quantize)


class IkLlamaCpp:
    """A model and a context with flash attention, the library's default."""

    def __init__(self, job: Job) -> None:
        self._library = library()
        self._library.llama_backend_init()
        name = job.format.removesuffix(REPACKED)
        repack = name != job.format
        file = job.model if name == "auto" else quantized(self._library, job, name)
        model = self._library.peer_model(str(file).encode(), repack)
        if not model:
            raise RuntimeError(f"ik_llama.cpp could not load {file}")
        self._vocabulary = int(self._library.llama_n_vocab(model))
        kv_type, bits = KV_TYPES[job.kv or "f16"]
        tokens = job.context * job.batch
        self._context = self._library.peer_context(model, tokens, job.batch, BATCH, job.threads, kv_type, True)
        if not self._context:
            raise RuntimeError("ik_llama.cpp could not make a context")
        features = self._library.llama_print_system_info().decode()
        enabled = " ".join(part.split("=")[0].strip() for part in features.split("|") if part.strip().endswith("= 1"))
        self.loaded = loaded(file, f"ik_llama.cpp {(BUILD / 'commit').read_text().strip()}, {enabled}", bits)

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Runs the loop of `batches` on an empty cache."""
        self._library.llama_kv_cache_clear(self._context)
        return timed(self._evaluate, prompts, gen)

    def _evaluate(self, rows: list[Row]) -> dict[int, int]:
        count = len(rows)
        columns = [
            (c_int32 * count)(*(row.token for row in rows)),
            (c_int32 * count)(*(row.position for row in rows)),
            (c_int32 * count)(*(row.sequence for row in rows)),
            (c_int8 * count)(*(row.wanted for row in rows)),
        ]
        if (status := self._library.peer_decode(self._context, count, *columns)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return {row.sequence: self._likeliest(index) for index, row in enumerate(rows) if row.wanted}

    def _likeliest(self, row: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocabulary,)).argmax())


def load(job: Job) -> IkLlamaCpp:
    """Quantizes the checkpoint if necessary, and loads it."""
    return IkLlamaCpp(job)
