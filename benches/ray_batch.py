#!/usr/bin/env python3
"""Measure Ray actors of one thread each against one process with as many threads, on the same prompts.

    python benches/ray_batch.py --shape llama-1b --quantization int4 --actors 2 --prompts 2000

Starts a Ray cluster on this machine. Prints one JSON object with output tokens per second of both, without the time to
load the model: the clock starts when every actor is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
from typing import Any, cast

import ray

from ferrule import LLM, SamplingParams
from ferrule._loading.shapes import find_shape
from ferrule.ray import LLMPredictor

PROMPT, OUTPUT = 128, 64
"""Number of tokens of a prompt and of an output."""
BATCH = 32
"""Number of rows in a batch."""


class Actor:
    """A predictor that an actor calls with batches, as `Dataset.map_batches` does."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._predictor = LLMPredictor(**options)

    async def run(self, prompts: list[list[int]]) -> int:
        """Returns the number of output tokens."""
        columns = await self._predictor({"tokenized_prompt": prompts})
        return sum(columns["num_generated_tokens"])


async def run_actors(actors: list[Any], batches: list[list[list[int]]], at_once: int) -> float:
    """Returns the output tokens per second of actors that run several batches at once each."""
    waiting = iter(batches)

    async def work(actor: Any) -> int:
        return sum([await actor.run.remote(batch) for batch in waiting])

    start = time.perf_counter()
    tokens = await asyncio.gather(*(work(actor) for actor in actors for _ in range(at_once)))
    return sum(tokens) / (time.perf_counter() - start)


def run_process(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Returns the output tokens per second of one process."""
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def main() -> None:
    """Prints the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences of the process; actors share them")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, in each of which both run")
    options = parser.parse_args()
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
    model: dict[str, Any] = {
        "model": find_shape(options.shape),
        "load_format": "dummy",
        "seed": 0,
        "quantization": options.quantization,
        "max_model_len": PROMPT + OUTPUT,
    }
    places = options.max_num_seqs // options.actors

    cast("Any", ray).init(num_cpus=options.actors, include_dashboard=False, logging_level=logging.ERROR)
    remote: Any = ray.remote(Actor)
    given = {**model, "sampling_params": sampling, "max_num_seqs": places}
    actors = [remote.options(num_cpus=1, max_concurrency=1000).remote(given) for _ in range(options.actors)]

    with LLM(**model, threads=options.actors, max_num_seqs=options.max_num_seqs) as llm:
        vocab_size = llm.info()["vocab_size"]
        numbers = random.Random(0)
        prompts = [numbers.choices(range(vocab_size), k=PROMPT) for _ in range(options.prompts)]
        batches = [prompts[first : first + BATCH] for first in range(0, len(prompts), BATCH)]
        params = SamplingParams(**sampling)
        run_process(llm, prompts[:2], params)
        ray.get([actor.run.remote(prompts[:2]) for actor in actors])
        rounds = [
            (asyncio.run(run_actors(actors, batches, 1 + places // BATCH)), run_process(llm, prompts, params))
            for _ in range(options.repeat)
        ]
    print(
        json.dumps(
            {
                "actors_tokens_per_second": statistics.median(first for first, _ in rounds),
                "process_tokens_per_second": statistics.median(second for _, second in rounds),
                "ratio": statistics.median(first / second for first, second in rounds),
            }
        )
    )


if __name__ == "__main__":
    main()
