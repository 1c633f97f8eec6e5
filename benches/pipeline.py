#!/usr/bin/env python3
"""Measure pipeline stages of one thread each against one process with as many threads, on the same prompts.

    python benches/pipeline.py --shape llama-1b --quantization int4 --stages 2 --sequences 16

The stages are processes of this machine. Prints one JSON object with the medians of alternating rounds in output tokens
per second, their ratio, and the bytes of weights of each stage relative to those of the whole model.
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


def speed(llm: LLM, prompts: list[TokensPrompt], params: SamplingParams) -> float:
    """Returns the output tokens per second."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def main() -> None:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
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
    params = SamplingParams(temperature=0, max_tokens=given.output_tokens, ignore_eos=True)
    with (
        LLM.from_shape(given.shape, threads=given.stages, **options) as whole,
        LLM.from_shape(given.shape, threads=1, pipeline_parallel_size=given.stages, **options) as pipeline,
    ):
        rounds = [(speed(whole, prompts, params), speed(pipeline, prompts, params)) for _ in range(given.rounds + 1)]
        one, stages = (statistics.median(each) for each in zip(*rounds[1:], strict=True))  # the first warms up
        info = pipeline.info()
        total = info["weight_bytes"] + info["vector_bytes"]
        result = {
            "shape": given.shape,
            "quantization": given.quantization,
            "sequences": given.sequences,
            "one_process": round(one, 1),
            "stages": round(stages, 1),
            "ratio": round(stages / one, 3),
            "weights_of_stages": [round(stage["weight_bytes"] / total, 3) for stage in info["pipeline_stages"]],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
