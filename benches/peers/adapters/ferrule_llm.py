"""ferrule through its Python API: the weight format is `quantization`, the cache format `kv_cache_dtype`."""

from __future__ import annotations

import time
from importlib.metadata import version

from adapters.interface import Job, Loaded, Timing
from ferrule import LLM, SamplingParams


class Ferrule:
    """A loaded LLM."""

    def __init__(self, job: Job) -> None:
        self._llm = LLM(
            job.model,
            quantization=job.format,
            threads=job.threads,
            max_model_len=job.context,
            kv_cache_dtype=job.kv or "auto",
            max_num_seqs=job.batch,
            enable_prefix_caching=False,
        )
        info = self._llm.info()
        self.loaded = Loaded(
            version=f"ferrule {version('ferrule')}: {info['isa']}, KV {info['kv_cache_dtype']}",
            total_bytes=info["weight_bytes"],
            token_bytes=info["weight_bytes_per_token"],
            kv_bytes_per_token=info["kv_bytes_per_token"],
        )

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Runs all prompts in one call; times of first tokens are taken from the requests' metrics."""
        params = SamplingParams(temperature=0, max_tokens=gen + 1, ignore_eos=True)
        start = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        seconds = time.perf_counter() - start
        first = [output.metrics.time_to_first_token for output in outputs]
        prefill = max(time for time in first if time is not None)
        return Timing(prefill, seconds - prefill, gen * len(prompts))


def load(job: Job) -> Ferrule:
    """Loads the checkpoint without conversion."""
    return Ferrule(job)
