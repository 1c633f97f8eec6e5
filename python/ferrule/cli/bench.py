"""`ferrule bench`: tokens per second of prefill and decode, one sequence at a time."""

from __future__ import annotations

import json
import math
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
from ferrule.shapes import find_shape, shape_names

CEILING_PASSES = 3


@click.command("bench")
@model_argument
@click.option("--prompt", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--gen", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens to generate.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Runs; medians are shown.")
@click.option("--shape", type=click.Choice(shape_names()), help="Measure random weights in this shape, not MODEL.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str | None, *, prompt: int, gen: int, repeat: int, shape: str | None, as_json: bool, **loading: Any
) -> None:
    """Measure how fast MODEL reads a prompt and writes a continuation, with random tokens."""
    from ferrule import _native

    if shape is not None:
        if model is not None:
            raise click.UsageError(f"give MODEL or --shape, not both: {model!r} and {shape!r}")
        model, loading = str(find_shape(shape)), {**loading, "load_format": "dummy"}
    with load(model, loading) as llm:
        info = llm.info()
        if prompt + gen > info["max_model_len"]:
            limit = f"the limit is max_model_len, {info['max_model_len']}"
            raise InvalidParameterError(f"--prompt {prompt} and --gen {gen} are {prompt + gen} tokens; {limit}")
        machine = _native.Ceilings(info["threads"])
        _measure(llm, info["vocab_size"], min(prompt, 32), 2)  # first touch of every page
        runs: list[RequestMetrics] = []
        ceilings: list[tuple[float, float, float]] = []
        for number in range(repeat):
            if sys.stderr.isatty():
                print(f"\rrun {number + 1} of {repeat}", end="", file=sys.stderr, flush=True)
            # The best of a few passes before each run: a ceiling is what the machine can do at that time.
            passes = [machine.measure() for _ in range(CEILING_PASSES)]
            ceilings.append((max(p[0] for p in passes), max(p[1] for p in passes), max(p[2] for p in passes)))
            runs.append(_measure(llm, info["vocab_size"], prompt, gen))
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)
    if shape is not None:
        info["model"] = shape
    record = _record(info, prompt, gen, runs, ceilings)
    if as_json:
        print(json.dumps(record))
        return
    print(f"{record['model']}: {record['format']} on {record['isa']}, {record['threads']} threads, median of {repeat}")
    print(f"prefill {prompt} tokens  {record['prefill_tokens_per_second']:.1f} tokens/s")
    print(f"decode  {gen} tokens  {record['decode_tokens_per_second']:.1f} tokens/s")
    for phase, share, ceiling in (
        ("decode ", "decode_bandwidth_fraction", f"read bandwidth of {record['read_gbps']:.1f} GB/s"),
        ("prefill", "prefill_f32_fraction", f"f32 peak of {record['f32_gflops']:.0f} GFLOPS"),
    ):
        print(f"{phase} uses {record[share]:.0%} of the {ceiling}")


def _record(
    info: dict[str, Any],
    prompt: int,
    gen: int,
    runs: list[RequestMetrics],
    ceilings: list[tuple[float, float, float]],
) -> dict[str, Any]:
    """The medians of the runs, and their ratios to the ceilings that were taken beside each of them."""
    prefill = [prompt / (run.time_to_first_token or math.inf) for run in runs]
    decode = [run.tokens_per_second or 0.0 for run in runs]
    # What a token must read: every weight once, and the keys and values of a context that grows to its end.
    token_bytes = info["weight_bytes_per_token"] + info["kv_bytes_per_token"] * (prompt + gen / 2)
    fractions = [speed * token_bytes / read for speed, (read, _, _) in zip(decode, ceilings, strict=True)]
    # A multiply-add for each weight and token, the head's once a prompt left out with the embedding.
    token_flops = 2 * info["layer_parameters"]
    peaks = [speed * token_flops / peak for speed, (_, peak, _) in zip(prefill, ceilings, strict=True)]
    median = statistics.median
    return {
        "model": info["model"],
        "format": info["quantization"],
        "isa": info["isa"],
        "threads": info["threads"],
        "weight_bytes": info["weight_bytes"],
        "kv_cache_dtype": info["kv_cache_dtype"],
        "repeat": len(runs),
        "prefill_tokens": prompt,
        "prefill_tokens_per_second": median(prefill),
        "decode_tokens": gen,
        "decode_tokens_per_second": median(decode),
        "time_to_first_token": median(run.time_to_first_token or math.inf for run in runs),
        "read_gbps": median(read for read, _, _ in ceilings) / 1e9,
        "f32_gflops": median(peak for _, peak, _ in ceilings) / 1e9,
        "add_probe": median(adds for _, _, adds in ceilings) / 1e9,
        "decode_bandwidth_fraction": median(fractions),
        "prefill_f32_fraction": median(peaks),
    }


def _measure(llm: LLM, vocab_size: int, prompt: int, gen: int) -> RequestMetrics:
    tokens = random.Random(0).choices(range(vocab_size), k=prompt)
    params = SamplingParams(temperature=0, max_tokens=gen, ignore_eos=True)
    return llm.generate({"prompt_token_ids": tokens}, params)[0].metrics
