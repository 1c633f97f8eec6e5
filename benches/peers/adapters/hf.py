"""transformers on PyTorch: the format is the dtype that weights are computed in."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
import transformers

from adapters.interface import Job, Loaded, Timing, only


class Transformers:
    """A model of transformers, with its default attention and cache."""

    def __init__(self, job: Job) -> None:
        if job.kv is not None:
            raise ValueError(f"kv is {job.kv!r}; transformers keeps its cache in the model's dtype")
        torch.set_num_threads(job.threads)
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[job.format]
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
        config = self._model.config
        size = dtype.itemsize
        total = size * sum(parameter.numel() for parameter in self._model.parameters())
        embedding = 0 if config.tie_word_embeddings else size * config.vocab_size * config.hidden_size
        self.loaded = Loaded(
            version=f"transformers {version('transformers')}, torch {torch.__version__}",
            total_bytes=total,
            token_bytes=total - embedding,
            kv_bytes_per_token=2 * size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
        )

    @torch.inference_mode()
    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Calls the forward pass with logits of the last token only, which is less work than `generate`."""
        prompt = only(prompts)
        start = time.perf_counter()
        step = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = step.logits[:, -1].argmax(dim=-1, keepdim=True)
        middle = time.perf_counter()
        for _ in range(gen):
            step = self._model(token, past_key_values=step.past_key_values, use_cache=True, logits_to_keep=1)
            token = step.logits[:, -1].argmax(dim=-1, keepdim=True)
        return Timing(middle - start, time.perf_counter() - middle, gen)


def load(job: Job) -> Transformers:
    """Loads the checkpoint without conversion."""
    return Transformers(job)
