"""onnxruntime-genai: converted by its model builder, with weights in int4 blocks (`int4-g32`) and int8 products."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime_genai

from adapters.interface import Job, Loaded, Timing, only


def converted(checkpoint: Path, work: Path, name: str) -> Path:
    """Returns the folder of a format, which is created unless it exists."""
    if not name.startswith("int4-g"):
        raise ValueError(f"format is {name!r}; it must be int4-gN with N the block size")
    folder = work / f"onnx-{name}"
    if not (folder / "genai_config.json").exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        paths = ["-i", str(checkpoint), "-o", str(folder), "-c", str(work / "onnx-cache")]
        # Accuracy level 4 multiplies int8 by int8, like all other peers; the builder's default is float.
        options = ["--extra_options", "int4_accuracy_level=4", f"int4_block_size={name.removeprefix('int4-g')}"]
        subprocess.run([*builder, *paths, *options], check=True)  # noqa: S603 -- the library's own program
    return folder


class OnnxGenai:
    """A model on the CPU."""

    def __init__(self, job: Job) -> None:
        if job.kv is not None:
            raise ValueError(f"kv is {job.kv!r}; the builder decides: f32")
        folder = converted(job.model, job.work, job.format)
        options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": job.threads}}}}
        config = onnxruntime_genai.Config(str(folder))
        config.overlay(json.dumps(options))
        self._model: Any = onnxruntime_genai.Model(config)
        self._context = job.context
        sizes = json.loads((job.model / "config.json").read_text())
        total = sum(file.stat().st_size for file in folder.glob("*.onnx.data"))
        # A separate embedding stays in f32; an embedding that is tied to lm_head is quantized with it.
        embedding = 4 * sizes["vocab_size"] * sizes["hidden_size"]
        self.loaded = Loaded(
            version=f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}, KV f32",
            total_bytes=total,
            token_bytes=total if sizes["tie_word_embeddings"] else total - embedding,
            kv_bytes_per_token=8 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"],
        )

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Appends the prompt to a new generator, then generates greedily token by token."""
        prompt = only(prompts)
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(max_length=self._context, min_length=self._context, do_sample=False)
        generator = onnxruntime_genai.Generator(self._model, params)
        start = time.perf_counter()
        generator.append_tokens(prompt)
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(gen):
            generator.generate_next_token()
        return Timing(middle - start, time.perf_counter() - middle, gen)


def load(job: Job) -> OnnxGenai:
    """Converts the checkpoint if necessary, and loads it."""
    return OnnxGenai(job)
