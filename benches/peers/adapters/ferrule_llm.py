"""ferrule by its Python API: the format is `quantization`, that of the cache `kv_cache_dtype`."""

from __future__ import annotations

from importlib.metadata import version

from adapters.interface import Job, Loaded, Timing
from ferrule import LLM, SamplingParams


class Ferrule:
    """A loaded LLM."""

    def __init__(self, job: Job) -> None:
        self._llm = LLM(
            job.checkpoint,
            quantization=job.format,
            threads=job.threads,
            max_model_len=job.context,
            kv_cache_dtype=job.kv or "auto",
        )
        info = self._llm.info()
        self.loaded = Loaded(
            version=f"ferrule {version('ferrule')}: {info['isa']}, KV {info['kv_cache_dtype']}",
            total_bytes=info["weight_bytes"],
            token_bytes=info["weight_bytes_per_token"],
            kv_bytes_per_token=info["kv_bytes_per_token"],
        )

    def measure(self, prompt: list[int], gen: int) -> Timing:
        """Times by the request's own clock."""
        params = SamplingParams(temperature=0, max_tokens=gen + 1, ignore_eos=True)
        metrics = self._llm.generate({"prompt_token_ids": prompt}, params)[0].metrics
        if metrics.time_to_first_token is None or metrics.tokens_per_second is None:
            raise RuntimeError(f"no times in {metrics}")
        return Timing(metrics.time_to_first_token, gen / metrics.tokens_per_second, gen)


def load(job: Job) -> Ferrule:
    """Reads the checkpoint itself."""
    return Ferrule(job)
