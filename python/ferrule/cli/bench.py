"""`ferrule bench`: tokens per second of prefill and decode, one sequence at a time."""

from __future__ import annotations

import json
import random
import statistics
import sys
from typing import Any

import click

from ferrule.cli.model import load, model_argument, model_options
from ferrule.errors import InvalidParameterError
from ferrule.llm import LLM
from ferrule.outputs import RequestMetrics
from ferrule.params import SamplingParams


@click.command("bench")
@model_argument
@click.option("--prompt", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--gen", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens to generate.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Runs; medians are shown.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, prompt: int, gen: int, repeat: int, as_json: bool, **loading: Any) -> None:
    """Measure how fast MODEL reads a prompt and writes a continuation, with random tokens."""
    with load(model, loading) as llm:
        info = llm.info()
        if prompt + gen > info["max_model_len"]:
            limit = f"the limit is max_model_len, {info['max_model_len']}"
            raise InvalidParameterError(f"--prompt {prompt} and --gen {gen} are {prompt + gen} tokens; {limit}")
        _measure(llm, info["vocab_size"], min(prompt, 32), 2)  # first touch of every page
        runs: list[RequestMetrics] = []
        for number in range(repeat):
            if sys.stderr.isatty():
                print(f"\rrun {number + 1} of {repeat}", end="", file=sys.stderr, flush=True)
            runs.append(_measure(llm, info["vocab_size"], prompt, gen))
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)
    record = {
        "model": info["model"],
        "format": info["quantization"],
        "isa": info["isa"],
        "threads": info["threads"],
        "weight_bytes": info["weight_bytes"],
        "kv_cache_dtype": info["kv_cache_dtype"],
        "repeat": repeat,
        "prefill_tokens": prompt,
        "prefill_tokens_per_second": statistics.median(prompt / (run.time_to_first_token or 1e-9) for run in runs),
        "decode_tokens": gen,
        "decode_tokens_per_second": statistics.median(run.tokens_per_second or 0.0 for run in runs),
        "time_to_first_token": statistics.median(run.time_to_first_token or 0.0 for run in runs),
    }
    if as_json:
        print(json.dumps(record))
        return
    print(f"{record['model']}: {record['format']} on {record['isa']}, {record['threads']} threads, median of {repeat}")
    print(f"prefill {prompt} tokens  {record['prefill_tokens_per_second']:.1f} tokens/s")
    print(f"decode  {gen} tokens  {record['decode_tokens_per_second']:.1f} tokens/s")


def _measure(llm: LLM, vocab_size: int, prompt: int, gen: int) -> RequestMetrics:
    tokens = random.Random(0).choices(range(vocab_size), k=prompt)
    params = SamplingParams(temperature=0, max_tokens=gen, ignore_eos=True)
    return llm.generate({"prompt_token_ids": tokens}, params)[0].metrics
