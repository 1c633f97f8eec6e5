#!/usr/bin/env python3
"""Measure a model over several workers of one thread each against one process with as many threads.

    python benches/pipeline.py --shape llama-1b --quantization int4 --stages 2 --sequences 16
    python benches/pipeline.py --shape llama-1b --quantization int4 --stages 2 --sequences 1 --prompt-tokens 1024
    python benches/pipeline.py --shape llama-1b --quantization int4 --stages 1 --ranks 2 --sequences 1

The workers are processes of this machine, or with `--distributed-executor-backend ray` actors on the hosts of the Ray
cluster RAY_ADDRESS: pipeline stages have one worker or several, which divide the rows of their matrices (ranks).
Prints one JSON object with the medians of alternating rounds on the same prompts: output tokens per second,
milliseconds of the prefill of all prompts (with one sequence its time to first token) and of a decode step, the
ratios of all three, and the bytes of weights of each worker relative to those of the whole model. A decode step is
the difference between generating all tokens and one token, so with fewer than 16 output tokens there are no step
times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from ferrule import LLM, SamplingParams
from ferrule._text.prompt import TokensPrompt

MIN_TOKENS_FOR_STEPS = 16
"""Minimum number of output tokens for step times to exceed the noise of two prefills."""


def measure(llm: LLM, prompts: list[TokensPrompt], tokens: int) -> tuple[float, float, float]:
    """Returns the output tokens per second, and the seconds of the prefill and of a decode step."""
    begin = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    whole = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, begin, use_tqdm=False)
    prefilled = time.perf_counter()
    llm.generate(prompts, whole, use_tqdm=False)
    seconds, of_prefill = time.perf_counter() - prefilled, prefilled - start
    return len(prompts) * tokens / seconds, of_prefill, (seconds - of_prefill) / (tokens - 1)


def main() -> None:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--distributed-executor-backend", default="mp")
    given = parser.parse_args()
    if given.output_tokens < 2:
        parser.error(f"--output-tokens must be >= 2, got {given.output_tokens}")
    options: dict[str, Any] = {
        "quantization": given.quantization,
        "max_model_len": given.prompt_tokens + given.output_tokens,
        "kv_cache_memory": 1 << 30,
        "enable_prefix_caching": False,
    }
    numbers = random.Random(1)
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [numbers.randrange(1000) for _ in range(given.prompt_tokens)]}
        for _ in range(given.sequences)
    ]
    sizes: dict[str, Any] = {
        "pipeline_parallel_size": given.stages,
        "tensor_parallel_size": given.ranks,
        "distributed_executor_backend": given.distributed_executor_backend,
    }
    with (
        LLM.from_shape(given.shape, threads=given.stages * given.ranks, **options) as one,
        LLM.from_shape(given.shape, threads=1, **sizes, **options) as several,
    ):
        rounds = [
            (*measure(one, prompts, given.output_tokens), *measure(several, prompts, given.output_tokens))
            for _ in range(given.rounds + 1)
        ]
        medians = [statistics.median(each) for each in zip(*rounds[1:], strict=True)]  # the first warms up
        of_one, prefill_of_one, step_of_one, of_several, prefill_of_several, step_of_several = medians
        info = several.info()
        total = info["weight_bytes"] + info["vector_bytes"]
        result = {
            "shape": given.shape,
            "quantization": given.quantization,
            "sequences": given.sequences,
            "one_process": round(of_one, 1),
            "several": round(of_several, 1),
            "ratio": round(of_several / of_one, 3),
            "prefill_ms_of_one_process": round(1e3 * prefill_of_one),
            "prefill_ms_of_several": round(1e3 * prefill_of_several),
            "prefill_ratio": round(prefill_of_several / prefill_of_one, 3),
            "weights_of_workers": [round(each["weight_bytes"] / total, 3) for each in info["workers"]],
        }
        if given.output_tokens >= MIN_TOKENS_FOR_STEPS:
            result |= {
                "step_ms_of_one_process": round(1e3 * step_of_one, 2),
                "step_ms_of_several": round(1e3 * step_of_several, 2),
                "step_ratio": round(step_of_several / step_of_one, 3),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
