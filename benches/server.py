#!/usr/bin/env python3
"""Measure the server with many clients (A to F), and the overhead of HTTP relative to the library.

    python benches/server.py load --requests 10000                      # A: no answer lost, mixed or different
    python benches/server.py load --requests 10000 --disconnects 0.3    # B: pages and memory come back
    python benches/server.py load --requests 2000 --kv-share 0.25       # C: a quarter of the KV cache that is needed
    python benches/server.py overload                                   # D: ten times as many clients as places
    python benches/server.py fallback --shape qwen3-0.6b --quantization int4   # E: half of the requests fall back
    python benches/server.py attack                                     # F: ten prompts of 7 MB beside an ordinary chat
    python benches/server.py overhead --shape llama-1b --quantization int4

The server runs in a separate process. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule import LLM, AsyncLLM, SamplingParams

OUTPUT_TOKENS = 32
"""Number of tokens of a request; clients disconnect before the last one."""
ATTACKERS, ATTACK_CHARACTERS = 10, 7_000_000
"""Number of prompts that are sent at once, and the length of each."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
"""Chat template of `attack --model`, instead of the template of the model: some checkpoints have none."""
OVERLOADED = {"max_num_seqs": 16, "max_queued_requests": 16}
"""Engine limits; ten times as many clients connect."""


@dataclass
class Server:
    """A server in a separate process."""

    process: subprocess.Popen[str]
    port: int

    def memory(self) -> int:
        """Returns its anonymous memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return sum(int(size) for size in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", status)) * 1024

    async def metric(self, name: str) -> float:
        """Returns a number of /metrics."""
        status, lines = await self.ask("GET", "/metrics")
        body = "\n".join([line async for line in lines])
        found = re.search(rf"^ferrule:{name}{{.*}} (.*)$", body, re.MULTILINE)
        if status != 200 or found is None:
            raise SystemExit(f"/metrics has no {name}: {status} {body[:200]}")
        return float(found[1])

    async def stream(self, prompt: str | list[int], max_tokens: int) -> tuple[int, AsyncIterator[str]]:
        """Requests a greedy completion; returns the status and the data of its events."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        status, lines = await self.ask("POST", "/v1/completions", body)
        return status, (line.removeprefix("data: ") async for line in lines if line.startswith("data: {"))

    async def ask(self, method: str, path: str, body: object = b"") -> tuple[int, AsyncIterator[str]]:
        """Sends a request, as `ask` does."""
        return await ask(self.port, method, path, body)


async def ask(port: int, method: str, path: str, body: object = b"") -> tuple[int, AsyncIterator[str]]:
    """Sends a request on a new connection; returns the status and the lines of the response body.

    The body is JSON as bytes, or a value to be encoded.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)

    async def lines() -> AsyncIterator[str]:
        try:
            while line := await reader.readline():
                yield line.decode().rstrip("\r\n")
        finally:
            writer.close()

    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return status, lines()


@contextmanager
def serving(shape: str | None, **options: Any) -> Generator[Server]:
    """Starts a server and waits until it is ready; with `cpus` it runs on these processors."""
    command = [sys.executable, __file__, "serve", json.dumps({"shape": shape, **options})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            if process.stdout is None:
                raise SystemExit("the server has no output")
            server = Server(process, int(process.stdout.readline()))
            asyncio.run(_ready(server))
            yield server
        finally:
            process.terminate()


async def _ready(server: Server) -> None:
    while (await server.ask("GET", "/health"))[0] != 200:
        await asyncio.sleep(0.1)


def serve(options: argparse.Namespace) -> None:
    """Runs the server in the child process."""
    from ferrule.server import ServerSettings
    from ferrule.server import serve as run

    given = json.loads(options.options)
    shape, settings = given.pop("shape"), ServerSettings(**given.pop("settings", {}))
    if cpus := given.pop("cpus", None):
        os.sched_setaffinity(0, cpus)

    def load() -> dict[str, AsyncLLM]:
        return {"model": AsyncLLM(**given) if shape is None else AsyncLLM.from_shape(shape, **given)}

    run(load, settings, port=0, on_listening=lambda url: print(url.rpartition(":")[2], flush=True))


def text_of(data: str) -> str:
    """Returns the data of an event."""
    event = json.loads(data)
    if "error" in event:
        raise ConnectionError(event["error"]["message"])
    return event["choices"][0]["text"]


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Measures A to C: compares many concurrent clients, each with a canary in its prompt, with single requests."""
    numbers = random.Random(0)
    prompts = [f"{numbers.randrange(10**9)} The canary of request {index} is" for index in range(options.prompts)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    more: dict[str, Any] = {"threads": options.threads}
    with LLM(threads=options.threads) as llm:
        solo = [llm.generate(prompt, params)[0].outputs[0].text for prompt in prompts]
        longest = max(map(len, map(llm.tokenize, prompts))) + OUTPUT_TOKENS
        info = llm.info()
    if options.kv_share is not None:
        # The KV cache must hold one sequence of the maximum length.
        demand = options.clients * longest * info["kv_bytes_per_token"]
        more |= {"kv_cache_memory": int(demand * options.kv_share), "max_model_len": longest, "max_num_seqs": 64}
    counts = dict.fromkeys(("complete", "left", "lost", "different"), 0)
    with serving(None, **more) as server:
        memory: list[int] = []

        async def client(shares: Iterator[int]) -> None:
            for number in shares:
                which = number % len(prompts)
                leaves = numbers.random() < options.disconnects
                stays = numbers.randrange(OUTPUT_TOKENS) if leaves else OUTPUT_TOKENS + 1
                try:
                    status, events = await server.stream(prompts[which], OUTPUT_TOKENS)
                    text = ""
                    if status == 200 and stays:
                        async for data in events:
                            text += text_of(data)
                            stays -= 1
                            if not stays:
                                break
                    await events.aclose()  # type: ignore[attr-defined]
                except (ConnectionError, asyncio.IncompleteReadError, IndexError):
                    counts["lost"] += 1
                    continue
                if leaves:
                    counts["left"] += 1
                    counts["different"] += not solo[which].startswith(text)
                else:
                    counts["complete" if text == solo[which] else "different" if status == 200 else "lost"] += 1
                if number % max(options.requests // 20, 1) == 0:
                    memory.append(server.memory())

        async def run() -> tuple[float, float, float]:
            shares = iter(range(options.requests))
            begun = time.perf_counter()
            await asyncio.gather(*(client(shares) for _ in range(options.clients)))
            took = time.perf_counter() - begun
            while await server.metric("num_requests_running") or await server.metric("num_requests_waiting"):
                await asyncio.sleep(0.05)
            return took, await server.metric("kv_cache_usage_perc"), await server.metric("num_preemptions_total")

        took, held, preemptions = asyncio.run(run())
    half = memory[len(memory) // 2 :]
    slope = statistics.linear_regression(range(len(half)), half).slope if len(half) > 1 else 0.0
    return {
        **counts,
        "requests": options.requests,
        "clients": options.clients,
        "requests_per_second": options.requests / took,
        "kv_cache_held_at_the_end": held,
        "preemptions": preemptions,
        "memory_bytes": memory[-1] if memory else None,
        "memory_bytes_per_request_in_the_second_half": slope / max(options.requests // 20, 1),
    }


def overload(options: argparse.Namespace) -> dict[str, Any]:
    """Measures D: the time until excess clients are rejected, and the time to first token of accepted clients."""
    rejected: list[float] = []
    first: list[float] = []
    places = sum(OVERLOADED.values())

    async def client(server: Server, number: int, until: float) -> None:
        while time.perf_counter() < until:
            begun = time.perf_counter()
            status, events = await server.stream(f"{number} is the number of", OUTPUT_TOKENS)
            if status == 503:
                rejected.append(time.perf_counter() - begun)
                await events.aclose()  # type: ignore[attr-defined]
                await asyncio.sleep(1)  # Retry-After
                continue
            seen = False
            async for _ in events:
                if not seen:
                    first.append(time.perf_counter() - begun)
                seen = True

    async def run(server: Server) -> None:
        until = time.perf_counter() + options.seconds
        await asyncio.gather(*(client(server, number, until) for number in range(10 * places)))

    with serving(None, threads=options.threads, **OVERLOADED) as server:
        asyncio.run(run(server))
    return {
        "places": places,
        "clients": 10 * places,
        "rejected": len(rejected),
        "accepted": len(first),
        "seconds_to_reject_p50": quantile(rejected, 0.5),
        "seconds_to_reject_p99": quantile(rejected, 0.99),
        "time_to_first_token_p50": quantile(first, 0.5),
        "time_to_first_token_p99": quantile(first, 0.99),
    }


def fallback(options: argparse.Namespace) -> dict[str, Any]:
    """Measures E: the time to first token with as many clients as places, and with twice as many and a fallback."""
    more: dict[str, Any] = {"quantization": options.quantization, "threads": options.threads}
    own, other = _halves(sorted(os.sched_getaffinity(0)))
    numbers = random.Random(0)
    prompt = numbers.choices(range(10, 4000), k=options.prompt)

    async def run(server: Server, clients: int) -> tuple[list[float], int]:
        """Returns the times to first token, and the number of requests without a complete answer."""
        first: list[float] = []
        lost = 0
        until = time.perf_counter() + options.seconds

        async def client() -> None:
            nonlocal lost
            while time.perf_counter() < until:
                begun = time.perf_counter()
                # A different beginning, so that no prompt is in the prefix cache.
                different = numbers.choices(range(10, 4000), k=4)
                status, events = await server.stream([*different, *prompt], OUTPUT_TOKENS)
                received = [(time.perf_counter() - begun, data) async for data in events]
                if status == 200 and received and _is_complete(received[-1][1]):
                    first.append(received[0][0])
                else:
                    lost += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        return first, lost

    with serving(options.shape, cpus=other, **more) as cloud:
        settings = {
            "fallback_url": f"http://127.0.0.1:{cloud.port}/v1",
            "fallback_when": ["queue"],
            "max_concurrent_requests": options.places,
        }
        with serving(options.shape, cpus=own, settings=settings, **more) as server:
            asyncio.run(run(server, 2 * options.places))  # warms up both
            warm = asyncio.run(server.metric("fallback_requests_total"))
            times: list[list[float]] = [[], []]
            lost = [0, 0]
            for _ in range(options.rounds):
                for load in (0, 1):
                    found, failed = asyncio.run(run(server, options.places * (1 + load)))
                    times[load] += found
                    lost[load] += failed
            sent = asyncio.run(server.metric("fallback_requests_total")) - warm
    p99 = [quantile(each, 0.99) or 0.0 for each in times]
    return {
        "places": options.places,
        "processors": [own, other],
        "requests": [len(each) for each in times],
        "lost": lost,
        "requests_sent_to_fallback": sent,
        "time_to_first_token_p50": [quantile(each, 0.5) for each in times],
        "time_to_first_token_p99": p99,
        "p99_ratio": p99[1] / p99[0],
    }


def _is_complete(data: str) -> bool:
    """Whether the last event of a stream says that the answer has all its tokens."""
    choices = json.loads(data).get("choices", [])
    return bool(choices) and choices[0]["finish_reason"] == "length"


def _halves(cpus: list[int]) -> tuple[list[int], list[int]]:
    """Divides processors between two servers, which would otherwise slow each other down; one processor is shared."""
    half = len(cpus) // 2
    return (cpus[:half], cpus[half:]) if half else (cpus, cpus)


def send_attacks(options: argparse.Namespace) -> None:
    """Runs the attackers in a child process, so that they do not delay the clock of the chats.

    For each line of stdin, sends ten prompts at once, and prints the statuses of the responses.
    """
    numbers = random.Random(0)
    passage = "".join(numbers.choices("abcdefghijklmnopqrstuvwxyz     ", k=100_000))
    messages = [{"role": "user", "content": passage * (ATTACK_CHARACTERS // len(passage))}]
    prompt = json.dumps({"messages": messages}).encode()

    async def send() -> int:
        status, lines = await ask(options.port, "POST", "/v1/chat/completions", prompt)
        async for _ in lines:
            pass
        return status

    async def send_all() -> list[int]:
        return await asyncio.gather(*(send() for _ in range(ATTACKERS)))

    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(asyncio.run(send_all())), flush=True)


def attack(options: argparse.Namespace) -> dict[str, Any]:
    """Measures F: the time to first token of a chat, alone and while the server handles ten prompts of 7 MB."""
    numbers = random.Random(0)

    async def chat(server: Server) -> float:
        """Returns the time to first token of an ordinary chat; no prompt is in the prefix cache."""
        question = f"{numbers.randrange(10**9)} is a number. What is the capital of France?"
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 1, "stream": True}
        begun = time.perf_counter()
        status, lines = await server.ask("POST", "/v1/chat/completions", body)
        times = [time.perf_counter() - begun async for line in lines if line.startswith("data: {")]
        if status != 200 or not times:
            raise SystemExit(f"the server does not answer an ordinary chat: {status}")
        return times[0]

    async def run(server: Server, attackers: subprocess.Popen[str]) -> dict[str, Any]:
        if attackers.stdin is None or attackers.stdout is None:
            raise SystemExit("the attackers have no input and output")
        alone: list[float] = []
        beside: list[float] = []
        statuses: list[int] = []
        durations: list[float] = []
        attackers.stdout.readline()  # they are ready
        for _ in range(options.chats):  # warms up
            await chat(server)
        for _ in range(options.rounds):
            alone += [await chat(server) for _ in range(options.chats)]
            begun = time.perf_counter()
            print(file=attackers.stdin, flush=True)
            answers = asyncio.create_task(asyncio.to_thread(attackers.stdout.readline))
            while not answers.done():
                beside.append(await chat(server))
            statuses += json.loads(answers.result())
            durations.append(time.perf_counter() - begun)
        limit = 3 * statistics.median(alone)
        return {
            "attacks": options.rounds,
            "prompts_refused": statuses.count(400),
            "prompts_not_refused": len(statuses) - statuses.count(400),
            "seconds_until_all_are_refused": statistics.median(durations),
            "chats": [len(alone), len(beside)],
            "time_to_first_token_p50": [statistics.median(alone), statistics.median(beside)],
            "time_to_first_token_p99": [quantile(alone, 0.99), quantile(beside, 0.99)],
            "chats_above_three_medians": [sum(each > limit for each in times) for times in (alone, beside)],
            "p50_ratio": statistics.median(beside) / statistics.median(alone),
        }

    more = {} if options.model is None else {"model": options.model, "settings": {"chat_template": CHAT_TEMPLATE}}
    with serving(None, threads=options.threads, **more) as server:
        command = [sys.executable, __file__, "send_attacks", str(server.port)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as attackers:  # noqa: S603
            return asyncio.run(run(server, attackers))


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Measures tokens per second and the time to first token of the server and of LLM.stream, in turns."""
    more: dict[str, Any] = {"quantization": options.quantization, "threads": options.threads}
    more["enable_prefix_caching"] = False
    llm = LLM(**more) if options.shape is None else LLM.from_shape(options.shape, **more)
    prompt = random.Random(0).choices(range(10, llm.info()["vocab_size"]), k=options.prompt)
    params = SamplingParams(temperature=0, max_tokens=options.gen, ignore_eos=True)

    def library() -> list[float]:
        begun = time.perf_counter()
        deltas = llm.stream({"prompt_token_ids": prompt}, params)
        return [time.perf_counter() - begun for delta in deltas if delta.token_ids]

    async def through(server: Server) -> list[float]:
        begun = time.perf_counter()
        _, events = await server.stream(prompt, options.gen)
        return [time.perf_counter() - begun async for _ in events]

    rates: dict[str, list[float]] = {"library": [], "server": []}
    firsts: dict[str, list[float]] = {"library": [], "server": []}
    with llm, serving(options.shape, **more) as server:
        for turn in range(options.repeat + 1):
            for name, times in (("library", library()), ("server", asyncio.run(through(server)))):
                if turn:  # the first warms up
                    rates[name].append((options.gen - 1) / (times[-1] - times[0]))
                    firsts[name].append(times[0])
    return {
        "shape": options.shape or "tiny",
        "tokens_per_second": {name: statistics.median(found) for name, found in rates.items()},
        "server_share": statistics.median(map(lambda a, b: a / b, rates["server"], rates["library"])),
        "time_to_first_token": {name: statistics.median(found) for name, found in firsts.items()},
        "time_to_first_token_added": statistics.median(map(lambda a, b: a - b, firsts["server"], firsts["library"])),
    }


def quantile(values: list[float], share: float) -> float | None:
    """Returns the quantile of `share`."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    if sys.argv[1:2] == ["serve"]:
        made = commands.add_parser("serve")
        made.add_argument("options")
        serve(parser.parse_args())
        return
    if sys.argv[1:2] == ["send_attacks"]:
        made = commands.add_parser("send_attacks")
        made.add_argument("port", type=int)
        send_attacks(parser.parse_args())
        return

    def command(function: Callable[[argparse.Namespace], dict[str, Any]]) -> argparse.ArgumentParser:
        made = commands.add_parser(function.__name__, help=function.__doc__)
        made.set_defaults(function=function)
        made.add_argument("--threads", type=int)
        return made

    many = command(load)
    many.add_argument("--requests", type=int, default=1000)
    many.add_argument("--clients", type=int, default=64)
    many.add_argument("--prompts", type=int, default=200, help="different ones")
    many.add_argument("--disconnects", type=float, default=0.0, help="share of clients that give up")
    many.add_argument("--kv-share", type=float, help="size of the cache, as a share of what all clients want")
    too_many = command(overload)
    too_many.add_argument("--seconds", type=float, default=20)
    hybrid = command(fallback)
    hybrid.add_argument("--shape", help="a name that `ferrule bench` knows; the embedded model without it")
    hybrid.add_argument("--quantization", default="auto")
    hybrid.add_argument("--places", type=int, default=1, help="requests that the first server runs at once")
    hybrid.add_argument("--prompt", type=int, default=128, help="tokens")
    hybrid.add_argument("--seconds", type=float, default=20, help="of each load in a round")
    hybrid.add_argument("--rounds", type=int, default=3, help="both loads, in turns")
    flood = command(attack)
    flood.add_argument("--model", help="a directory, file or name; the embedded model without it")
    flood.add_argument("--rounds", type=int, default=10, help="attacks, one after the other")
    flood.add_argument("--chats", type=int, default=20, help="chats before each attack")
    cost = command(overhead)
    cost.add_argument("--shape", help="a name that `ferrule bench` knows; the embedded model without it")
    cost.add_argument("--quantization", default="auto")
    cost.add_argument("--prompt", type=int, default=32, help="tokens")
    cost.add_argument("--gen", type=int, default=128, help="tokens")
    cost.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(options.function(options), indent=1))


if __name__ == "__main__":
    main()
