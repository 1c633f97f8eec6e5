#!/usr/bin/env python3
"""Measure one engine with many callers: gaps during a long prefill, common prefixes, turns of a chat, cancelled tasks.

    python benches/serving.py gaps --shape llama-1b --quantization int4
    python benches/serving.py prefix --shape llama-1b --quantization int4
    python benches/serving.py turns --shape lfm2-1.2b --quantization int4
    python benches/serving.py tasks

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ferrule import LLM, AsyncLLM, CompletionOutput, SamplingParams
from ferrule._bench.machine import Machine
from ferrule._text.prompt import TokensPrompt

HEARTBEAT = 0.001
"""Interval in seconds of the task that measures how long the event loop is blocked."""
ARRIVALS = 1.0
"""Seconds over which the requests of a wave arrive, since a thousand at one moment would block any event loop."""
UNDISTURBED = 2.0
"""Seconds of decoding before the long prompt arrives."""


def prompt(numbers: random.Random, vocab_size: int, length: int) -> TokensPrompt:
    """Returns random tokens."""
    return {"prompt_token_ids": numbers.choices(range(vocab_size), k=length)}


def quantile(values: list[float], share: float) -> float:
    """Returns the quantile of `share`."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def model(options: argparse.Namespace, **more: Any) -> LLM:
    """Loads the shape, or the embedded model."""
    more |= {"quantization": options.quantization, "threads": options.threads, "kv_cache_dtype": options.kv_cache_dtype}
    return LLM(**more) if options.shape is None else LLM.from_shape(options.shape, **more)


async def run_gaps(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the inter-token latency of decoding sequences during the prefill of a long prompt."""
    shape = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype, "threads": options.threads}
    shape |= {"enable_prefix_caching": False, "target_itl": options.target_itl}
    llm = AsyncLLM(**shape) if options.shape is None else AsyncLLM.from_shape(options.shape, **shape)
    vocab_size = llm.info()["vocab_size"]
    machine = Machine(llm.info()["threads"])
    before = machine.measure()
    arrived: list[list[float]] = [[] for _ in range(options.neighbours)]

    async def decode(index: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True)
        async for delta in llm.stream(prompt(random.Random(index), vocab_size, 128), params):
            arrived[index].extend([time.perf_counter()] * len(delta.token_ids))

    neighbours = [asyncio.create_task(decode(index)) for index in range(options.neighbours)]
    while not all(arrived):
        await asyncio.sleep(0.01)
    await asyncio.sleep(UNDISTURBED)
    steps = llm.metrics().steps
    begin = time.perf_counter()
    one = SamplingParams(temperature=0, max_tokens=1)
    async for _ in llm.generate(prompt(random.Random(-1), vocab_size, options.prompt), one):
        pass
    end = time.perf_counter()
    steps = llm.metrics().steps - steps
    for task in neighbours:
        task.cancel()
    await asyncio.gather(*neighbours, return_exceptions=True)
    after = machine.measure()
    await llm.aclose()

    def between(first: float, last: float) -> list[float]:
        pairs = [pair for times in arrived for pair in itertools.pairwise(times)]
        return [new - old for old, new in pairs if first <= new <= last]

    beside, undisturbed = between(begin, end), between(begin - UNDISTURBED, begin)
    return {
        "neighbours": options.neighbours,
        "prompt": options.prompt,
        "prompt_seconds": end - begin,
        "prompt_tokens_per_step": options.prompt / steps,
        "gaps": len(beside),
        "gap_median_ms": 1e3 * statistics.median(beside),
        "gap_p99_ms": 1e3 * quantile(beside, 0.99),
        "gap_max_ms": 1e3 * max(beside),
        "undisturbed_gap_median_ms": 1e3 * statistics.median(undisturbed),
        "read_gbps": [before.read / 1e9, after.read / 1e9],
        "int8_gops": [before.int8 / 1e9, after.int8 / 1e9],
    }


def gaps(options: argparse.Namespace) -> dict[str, Any]:
    """Runs `run_gaps`."""
    return asyncio.run(run_gaps(options))


def first_token_seconds(llm: LLM, tokens: list[int]) -> float:
    """Measures the time to first token of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    seconds = llm.generate({"prompt_token_ids": tokens}, params)[0].metrics.time_to_first_token
    if seconds is None:
        raise RuntimeError("no first token")
    return seconds


def prefix(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the time to first token with a common prefix: first and later prompts, and after a restart."""
    results: dict[str, list[float]] = {"first": [], "second": [], "restarted": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeat):
            numbers = random.Random(number)
            shared: list[int] = []
            for names in (("first", "second"), ("restarted",)):
                with model(options, prefix_cache_dir=Path(folder) / "pages") as llm:
                    vocabulary = range(llm.info()["vocab_size"])
                    shared = shared or numbers.choices(vocabulary, k=options.prompt)
                    first_token_seconds(llm, [1] * 64)  # first touch of the weights
                    for name in names:
                        tokens = [*shared, *numbers.choices(vocabulary, k=options.own)]
                        results[name].append(first_token_seconds(llm, tokens))

    def share(name: str) -> float:
        return statistics.median(b / a for a, b in zip(results["first"], results[name], strict=True))

    return {
        "shared_tokens": options.prompt,
        "own_tokens": options.own,
        "ttft_seconds": {name: statistics.median(seconds) for name, seconds in results.items()},
        "second_share": share("second"),
        "restarted_share": share("restarted"),
    }


def ask(llm: LLM, tokens: list[int], count: int) -> tuple[CompletionOutput, float, int]:
    """Returns `count` tokens with log-probabilities, the time to the first one, and the number of cached tokens."""
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=5, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": tokens}, params)[0]
    if output.metrics.time_to_first_token is None:
        raise RuntimeError("no first token")
    return output.outputs[0], output.metrics.time_to_first_token, output.num_cached_tokens or 0


def turns(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the time to first token of the second turn of a chat: in memory, after a restart, without a cache."""
    numbers = random.Random(0)
    seconds: dict[str, float] = {}
    cached: dict[str, int] = {}
    answers: dict[str, CompletionOutput] = {}
    length = options.prompt + options.answer + options.own + options.answer
    more = {"max_model_len": length, "max_num_seqs": 1}
    first: list[int] = []
    second: list[int] = []

    def measure(llm: LLM, name: str, tokens: list[int]) -> None:
        answers[name], seconds[name], cached[name] = ask(llm, tokens, options.answer)

    with tempfile.TemporaryDirectory() as folder:
        on_disk = more | {"prefix_cache_dir": Path(folder) / "pages"}
        with model(options, **on_disk) as llm:
            vocabulary = range(llm.info()["vocab_size"])
            first = numbers.choices(vocabulary, k=options.prompt)
            ask(llm, [1] * 64, 2)  # first touch of the weights
            measure(llm, "first", first)
            second = [*first, *answers["first"].token_ids, *numbers.choices(vocabulary, k=options.own)]
        with model(options, **on_disk) as llm:
            ask(llm, [1] * 64, 2)
            measure(llm, "restarted", second)
    with model(options, **more) as llm:
        ask(llm, first, options.answer)
        measure(llm, "second", second)
    with model(options, **more, enable_prefix_caching=False) as llm:
        ask(llm, [1] * 64, 2)
        measure(llm, "recomputed", second)
    recomputed = answers["recomputed"]
    return {
        "prompt_tokens": options.prompt,
        "answer_tokens": options.answer,
        "second_prompt_tokens": len(second),
        "cached_tokens": cached,
        "ttft_seconds": seconds,
        "second_share": seconds["second"] / seconds["first"],
        "restarted_share": seconds["restarted"] / seconds["first"],
        "tokens_and_logprobs_are_recomputed_ones": {
            name: (answers[name].token_ids, answers[name].logprobs) == (recomputed.token_ids, recomputed.logprobs)
            for name in ("second", "restarted")
        },
    }


def resident_bytes() -> int:
    """Returns the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def run_tasks(options: argparse.Namespace) -> dict[str, Any]:
    """Runs many tasks on one AsyncLLM and cancels some of them; the others must get the same output as alone."""
    numbers = random.Random(1)
    llm = AsyncLLM(threads=options.threads, max_num_seqs=32)
    vocab_size = llm.info()["vocab_size"]

    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=0.8, seed=seed, max_tokens=8 + seed % 40, ignore_eos=True)

    kinds = [prompt(numbers, vocab_size, 1 + 7 * kind) for kind in range(24)]

    async def ask(kind: int) -> list[int]:
        token_ids: list[int] = []
        async for output in llm.generate(kinds[kind], params(kind)):
            token_ids = output.outputs[0].token_ids
        return token_ids

    alone = [await ask(kind) for kind in range(len(kinds))]
    longest = 0.0
    watching = True

    async def watch() -> None:
        nonlocal longest
        while watching:
            before = time.perf_counter()
            await asyncio.sleep(HEARTBEAT)
            longest = max(longest, time.perf_counter() - before - HEARTBEAT)

    watcher = asyncio.create_task(watch())
    memory: list[int] = []
    lost = mixed = cancelled = 0
    begin = time.perf_counter()
    for _ in range(options.waves):

        async def one() -> None:
            nonlocal mixed, cancelled
            kind = numbers.randrange(len(kinds))
            await asyncio.sleep(numbers.random() * ARRIVALS)
            task = asyncio.create_task(ask(kind))
            if numbers.random() < 0.3:
                await asyncio.sleep(numbers.random() * 0.3)
                task.cancel()
            try:
                mixed += await task != alone[kind]
            except asyncio.CancelledError:
                cancelled += 1

        await asyncio.gather(*(one() for _ in range(options.requests)))
        while (metrics := llm.metrics()).running or metrics.waiting:
            await asyncio.sleep(0.01)
        lost += metrics.pages_total - metrics.pages_free
        memory.append(resident_bytes())
    seconds = time.perf_counter() - begin
    watching = False
    await watcher
    await llm.aclose()
    half = len(memory) // 2
    return {
        "requests": options.requests * options.waves,
        "cancelled": cancelled,
        "mixed": mixed,
        "pages_lost": lost,
        "seconds": seconds,
        "loop_blocked_max_ms": 1e3 * longest,
        "memory_mb": [round(bytes_ / 1e6, 1) for bytes_ in memory],
        "bytes_per_request_after_half": (memory[-1] - memory[half])
        / max(options.requests * (len(memory) - 1 - half), 1),
    }


def tasks(options: argparse.Namespace) -> dict[str, Any]:
    """Runs `run_tasks`."""
    return asyncio.run(run_tasks(options))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(function: Callable[[argparse.Namespace], dict[str, Any]]) -> argparse.ArgumentParser:
        made = commands.add_parser(function.__name__, help=function.__doc__)
        made.set_defaults(function=function)
        made.add_argument("--threads", type=int)
        return made

    def shaped(function: Callable[[argparse.Namespace], dict[str, Any]], length: int) -> argparse.ArgumentParser:
        made = command(function)
        made.add_argument("--shape", help="a name that `ferrule bench` knows; the embedded model without it")
        made.add_argument("--quantization", default="auto")
        made.add_argument("--kv-cache-dtype", default="auto")
        made.add_argument("--prompt", type=int, default=length, help="tokens")
        return made

    beside = shaped(gaps, 8192)
    beside.add_argument("--neighbours", type=int, default=4)
    beside.add_argument("--target-itl", type=float)
    alike = shaped(prefix, 2000)
    alike.add_argument("--own", type=int, default=16, help="tokens of each prompt after those that all have")
    alike.add_argument("--repeat", type=int, default=3)
    chat = shaped(turns, 15_000)
    chat.add_argument("--answer", type=int, default=100, help="tokens of each answer")
    chat.add_argument("--own", type=int, default=60, help="tokens of the second turn's text")
    many = command(tasks)
    many.add_argument("--requests", type=int, default=1000)
    many.add_argument("--waves", type=int, default=6)
    options = parser.parse_args()
    print(json.dumps(options.function(options), indent=1))


if __name__ == "__main__":
    main()
