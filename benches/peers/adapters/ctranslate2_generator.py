"""CTranslate2: converted by its own converter of transformers' models, with weights in int8 and a cache in f32."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2

from adapters.interface import Job, Loaded, Timing, only


def converted(checkpoint: Path, work: Path, name: str) -> Path:
    """Returns the folder of a format, which is created unless it exists."""
    if name != "int8":
        raise ValueError(f"format is {name!r}; it must be int8")
    folder = work / f"ctranslate2-{name}"
    if not (folder / "model.bin").exists():
        from ctranslate2.converters import TransformersConverter

        unfinished = folder.with_suffix(".unfinished")
        TransformersConverter(str(checkpoint), low_cpu_mem_usage=True).convert(
            str(unfinished), quantization=name, force=True
        )
        unfinished.rename(folder)
    return folder


class Generator:
    """A generator on the CPU."""

    def __init__(self, job: Job) -> None:
        if job.kv is not None:
            raise ValueError(f"kv is {job.kv!r}; CTranslate2 decides: f32 with weights in int8")
        folder = converted(job.model, job.work, job.format)
        self._generator: Any = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=job.format, inter_threads=1, intra_threads=job.threads
        )
        self._tokens: list[str] = json.loads((folder / "vocabulary.json").read_text())
        config = json.loads((job.model / "config.json").read_text())
        total = (folder / "model.bin").stat().st_size
        embedding = config["vocab_size"] * (config["hidden_size"] + 4)  # with an f32 scale per row
        self.loaded = Loaded(
            version=f"ctranslate2 {version('ctranslate2')}, {self._generator.compute_type}, KV f32",
            total_bytes=total,
            token_bytes=total if config["tie_word_embeddings"] else total - embedding,
            kv_bytes_per_token=8 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"],
        )

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Takes the time of each token from the generator's callback; the shortest answer allowed is the longest."""
        prompt = only(prompts)
        times: list[float] = []

        def note(_: object) -> bool:
            times.append(time.perf_counter())
            return False  # go on

        start = time.perf_counter()
        self._generator.generate_batch(
            [[self._tokens[token] for token in prompt]],
            max_length=gen + 1,
            min_length=gen + 1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note,
        )
        return Timing(times[0] - start, times[-1] - times[0], len(times) - 1)


def load(job: Job) -> Generator:
    """Converts the checkpoint if necessary, and loads it."""
    return Generator(job)
