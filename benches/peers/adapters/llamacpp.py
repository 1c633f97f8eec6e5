"""llama.cpp through the low-level functions of llama-cpp-python: llama.cpp's decode loop without Python sampling."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np

from adapters.batches import BATCH, Row, timed
from adapters.gguf_file import quantized
from adapters.gguf_sizes import loaded
from adapters.interface import Job, Timing

KV_TYPES = {"f16": (llama_cpp.GGML_TYPE_F16, 16.0), "q8_0": (llama_cpp.GGML_TYPE_Q8_0, 8.5)}
"""Cache types, and the number of bits of an element."""
TRIALS = 2


@llama_cpp.llama_log_callback
def LOG(level: int, text: bytes, _: object) -> None:  # noqa: N802 -- a constant that C holds
    """Passes on only warnings and errors."""
    if level in (3, 4):  # GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))


def build_features() -> list[str]:
    """Build options of the library, mainly instruction sets."""
    pairs = llama_cpp.llama_print_system_info().decode().partition(":")[2].split("|")
    return [name.strip() for name, _, value in (pair.partition("=") for pair in pairs) if value.strip() == "1"]


class LlamaCpp:
    """A model, and the fastest context: with or without flash attention, one cache for all sequences or one each."""

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_log_set(LOG, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        file = job.model if job.format == "auto" else quantized(job.model, job.work, job.format, job.threads)
        self._model: Any = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {file}")
        self._vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        self._job = job
        self._kv_type, bits = KV_TYPES[job.kv or "f16"]
        self._context: Any = None
        self._batch: Any = llama_cpp.llama_batch_init(BATCH, 0, 1)
        flash, unified = self._choose()
        self.loaded = loaded(
            file,
            f"llama-cpp-python {version('llama_cpp_python')}, flash attention {'on' if flash else 'off'}, "
            + ("one cache for all sequences: " if unified and job.batch > 1 else "")
            + " ".join(build_features()),
            bits,
        )

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Runs the loop of `batches` on an empty cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return timed(self._evaluate, prompts, gen)

    def _evaluate(self, rows: list[Row]) -> dict[int, int]:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = row.token, row.position, row.wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row.sequence
        if (status := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return {row.sequence: self._likeliest(index) for index, row in enumerate(rows) if row.wanted}

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocabulary,)).argmax())

    def _open(self, flash: bool, unified: bool) -> None:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._job.context * self._job.batch
        params.n_seq_max = self._job.batch
        params.kv_unified = unified
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = self._job.threads
        params.type_k = params.type_v = self._kv_type
        params.flash_attn_type = int(flash)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")

    def _choose(self) -> tuple[bool, bool]:
        """Opens the fastest context; returns whether it has flash attention, and one cache for all sequences.

        A q8_0 cache needs flash attention.
        """
        length = min(BATCH // self._job.batch, self._job.context - 32)
        prompts = [list(range(3 + sequence, 3 + sequence + length)) for sequence in range(self._job.batch)]
        seconds: dict[tuple[bool, bool], float] = {}
        for flash in (True,) if self._kv_type != llama_cpp.GGML_TYPE_F16 else (True, False):
            for unified in (True, False) if self._job.batch > 1 else (True,):
                self._open(flash, unified)
                self.measure([prompt[:16] for prompt in prompts], 1)  # the first access to each memory page is slow
                timings = [self.measure(prompts, 16) for _ in range(TRIALS)]
                seconds[flash, unified] = min(timing.prefill_seconds for timing in timings) + 4 * min(
                    timing.decode_seconds for timing in timings
                )
        best = min(seconds, key=lambda choice: seconds[choice])
        self._open(*best)
        return best


def load(job: Job) -> LlamaCpp:
    """Converts the checkpoint if necessary, and loads it."""
    return LlamaCpp(job)
