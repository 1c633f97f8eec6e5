"""OpenVINO GenAI: converted by optimum-intel, with weights in int8 or in int4 of a group size (`int4-g128`)."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from adapters.interface import Job, Loaded, Timing, only

KV_BYTES = {"u8": 1, "f16": 2, "bf16": 2, "f32": 4}
SCALE_BYTES = 8
"""Bytes of the f32 scale and the f32 zero point for each head of a token, in a u8 cache."""


def converted(checkpoint: Path, work: Path, name: str) -> Path:
    """Returns the folder of a format, which is created unless it exists."""
    match = re.fullmatch(r"int8|int4-g(\d+)", name)
    if match is None:
        raise ValueError(f"format is {name!r}; it must be int8 or int4-gN with N the group size")
    folder = work / f"openvino-{name}"
    if not (folder / "openvino_model.bin").exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        bits = (
            OVWeightQuantizationConfig(bits=8, sym=True)
            if name == "int8"
            else OVWeightQuantizationConfig(bits=4, sym=True, group_size=int(match[1]), ratio=1.0)
        )
        model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, quantization_config=bits)
        unfinished = folder.with_suffix(".unfinished")
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


class OpenVino:
    """A pipeline on the CPU."""

    def __init__(self, job: Job) -> None:
        folder = converted(job.model, job.work, job.format)
        kv = job.kv or "u8"
        properties = {"INFERENCE_NUM_THREADS": job.threads, "KV_CACHE_PRECISION": kv}
        self._pipeline = openvino_genai.LLMPipeline(folder, "CPU", properties)
        config = json.loads((job.model / "config.json").read_text())
        total = (folder / "openvino_model.bin").stat().st_size
        # Embeddings stay in int8, with an f16 scale per row.
        embedding = config["vocab_size"] * (config["hidden_size"] + 2)
        width = config["head_dim"] * KV_BYTES[kv] + (SCALE_BYTES if kv == "u8" else 0)
        self.loaded = Loaded(
            version=f"openvino-genai {version('openvino-genai')}, KV {kv}",
            total_bytes=total,
            token_bytes=total if config["tie_word_embeddings"] else total - embedding,
            kv_bytes_per_token=2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width,
        )

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Takes times from the pipeline's metrics, which exclude tokenization."""
        prompt = only(prompts)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        config = openvino_genai.GenerationConfig(max_new_tokens=gen + 1, ignore_eos=True, do_sample=False)
        metrics = self._pipeline.generate(ids, config).perf_metrics
        tokens = metrics.get_num_generated_tokens() - 1
        return Timing(metrics.get_ttft().mean / 1000, metrics.get_tpot().mean / 1000 * tokens, tokens)


def load(job: Job) -> OpenVino:
    """Converts the checkpoint if necessary, and loads it."""
    return OpenVino(job)
