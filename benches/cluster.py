#!/usr/bin/env python
"""Predict the throughput and latencies of several machines from the record of one.

    ferrule bench --shape llama-1b --quantization int4 --batch 1,4,16 --json > one.json
    python benches/cluster.py one.json --machines 1,2,4,8 --rate 0.5 --prompt 512 --output 128
    python benches/cluster.py one.json --machines 4 --rate 0.5 --turns 8 --routing prefix

Simulates machines that each hold the whole model. Conversations arrive at random times (Poisson, RATE a second) and
go to the machine with the fewest unfinished requests; with `--routing prefix`, later turns go to the machine that
holds the prefix of their conversation. A machine runs steps as the engine does: a token for each running sequence,
and the next chunk of the waiting prompts. The time of a step is that of a decode step of its sequences in the record,
interpolated between its batch sizes, plus the prefill time of its prompt tokens. Not simulated: the network,
longer steps at longer contexts, eviction from the prefix cache. Prints one JSON object for each number of machines.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Speed:
    """Times of one machine."""

    steps: Sequence[tuple[int, float]]
    """Number of sequences and the seconds of a decode step for them, ascending."""
    prefill: float
    """Seconds of a prompt token."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Speed:
        """Reads the output of `ferrule bench --json`, at the shortest context of each batch size."""
        points = sorted(record.get("points", [record]), key=lambda point: (point["batch"], point["prefill_tokens"]))
        first = {point["batch"]: point["decode_step_seconds"] for point in reversed(points)}
        return cls(sorted(first.items()), statistics.median(point["prefill_seconds_per_token"] for point in points))

    def decode(self, sequences: int) -> float:
        """Returns the seconds of a decode step; beyond the largest batch of the record each sequence takes the same."""
        if not sequences:
            return 0.0
        if sequences <= self.steps[0][0] or len(self.steps) == 1:
            return self.steps[0][1] * max(1.0, sequences / self.steps[0][0])
        after = next((at for at, (size, _) in enumerate(self.steps) if size >= sequences), None)
        if after is None:
            size, seconds = self.steps[-1]
            return seconds * sequences / size
        (low, fast), (high, slow) = self.steps[after - 1 : after + 1]
        return fast + (slow - fast) * (sequences - low) / (high - low)


@dataclass
class Request:
    """A turn of a conversation."""

    conversation: int
    turn: int
    arrived: float
    new: int
    """Prompt tokens that the machine still has to compute."""
    left: int
    """Tokens of the answer that are still to come."""
    last: float = 0.0
    """Time of the last token."""


@dataclass
class Machine:
    """A machine with its queue."""

    prompts: deque[Request] = field(default_factory=deque["Request"])
    """Requests whose prompts are not computed yet, in order of arrival."""
    running: list[Request] = field(default_factory=list["Request"])
    stepping: bool = False
    busy: float = 0.0
    """Seconds of all steps."""

    @property
    def load(self) -> int:
        """Number of unfinished requests."""
        return len(self.prompts) + len(self.running)


@dataclass(frozen=True)
class Traffic:
    """Requests of the clients."""

    rate: float
    """Conversations a second."""
    conversations: int
    turns: int
    prompt: int
    """New tokens of each turn."""
    output: int
    """Tokens of each answer."""
    pause: float
    """Seconds between an answer and the next turn."""


class Cluster:
    """A simulation; `run` returns its figures."""

    def __init__(
        self,
        speed: Speed,
        machines: int,
        traffic: Traffic,
        *,
        by_prefix: bool = False,
        chunk: int = 512,
        max_num_seqs: int = 64,
        seed: int = 0,
    ) -> None:
        """Creates a cluster: `chunk` tokens a step at most, and `max_num_seqs` running sequences of a machine."""
        self.speed, self.traffic, self.by_prefix = speed, traffic, by_prefix
        self.chunk, self.max_num_seqs = chunk, max_num_seqs
        self.machines = [Machine() for _ in range(machines)]
        self.numbers = random.Random(seed)
        self.homes: dict[int, Machine] = {}
        """The machine that computed the last turn of each conversation."""
        self.first_tokens: list[float] = []
        self.gaps: list[float] = []
        self.prompt_tokens = self.cached_tokens = self.requests = 0
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> dict[str, float]:
        """Simulates all conversations."""
        arrival = 0.0
        for conversation in range(self.traffic.conversations):
            arrival += self.numbers.expovariate(self.traffic.rate)
            self._at(arrival, lambda conversation=conversation: self._arrive(conversation, 0))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return {
            "machines": len(self.machines),
            "requests_per_second": self.requests / self.now,
            "output_tokens_per_second": self.requests * self.traffic.output / self.now,
            "time_to_first_token_p50": _quantile(self.first_tokens, 0.5),
            "time_to_first_token_p99": _quantile(self.first_tokens, 0.99),
            "inter_token_latency_p50": _quantile(self.gaps, 0.5),
            "inter_token_latency_p99": _quantile(self.gaps, 0.99),
            "busy_share": sum(machine.busy for machine in self.machines) / self.now / len(self.machines),
            "prefix_cache_hit_rate": self.cached_tokens / self.prompt_tokens,
        }

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _arrive(self, conversation: int, turn: int) -> None:
        past = turn * (self.traffic.prompt + self.traffic.output)
        home = self.homes.get(conversation)
        machine = min(self.machines, key=lambda machine: machine.load)
        if self.by_prefix and home is not None:
            machine = home
        cached = past if machine is home else 0
        self.homes[conversation] = machine
        whole = past + self.traffic.prompt
        self.prompt_tokens += whole
        self.cached_tokens += cached
        machine.prompts.append(Request(conversation, turn, self.now, whole - cached, self.traffic.output))
        if not machine.stepping:
            self._step(machine)

    def _step(self, machine: Machine) -> None:
        """Begins a step: a token for each running sequence and the next chunk of prompts."""
        budget = max(self.chunk - len(machine.running), 0)
        places = self.max_num_seqs - len(machine.running)
        parts: list[tuple[Request, int]] = []
        for request in itertools.islice(machine.prompts, max(places, 0)):
            part = min(budget, request.new)
            if not part:
                break
            parts.append((request, part))
            budget -= part
        machine.stepping = bool(parts or machine.running)
        if machine.stepping:
            tokens = sum(part for _, part in parts)
            seconds = self.speed.decode(len(machine.running)) + self.speed.prefill * tokens
            machine.busy += seconds
            self._at(self.now + seconds, lambda: self._end_step(machine, parts))

    def _end_step(self, machine: Machine, parts: Sequence[tuple[Request, int]]) -> None:
        for request in machine.running:
            self.gaps.append(self.now - request.last)
            request.last = self.now
            request.left -= 1
        for request, part in parts:
            request.new -= part
            if not request.new:
                machine.prompts.popleft()
                self.first_tokens.append(self.now - request.arrived)
                request.last = self.now
                request.left -= 1
                machine.running.append(request)
        ended = [request for request in machine.running if not request.left]
        machine.running = [request for request in machine.running if request.left]
        for request in ended:
            self.requests += 1
            following = request.turn + 1
            if following < self.traffic.turns:
                self._at(
                    self.now + self.traffic.pause,
                    lambda request=request, following=following: self._arrive(request.conversation, following),
                )
        self._step(machine)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Returns an argument type that accepts positive numbers."""

    def positive(text: str) -> float:
        number = kind(text)
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
        return number

    return positive


def main() -> None:
    """Runs the command."""
    positive_float, positive_int = _positive(float), _positive(int)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="output of `ferrule bench --json` on one machine")
    parser.add_argument(
        "--machines",
        type=lambda text: [positive_int(number) for number in text.split(",")],
        default="1,2,4",
        help="numbers of machines (default: 1,2,4)",
    )
    parser.add_argument("--rate", type=positive_float, default=0.5, help="conversations a second (default: 0.5)")
    parser.add_argument(
        "--conversations", type=positive_int, default=500, help="number of conversations (default: 500)"
    )
    parser.add_argument("--turns", type=positive_int, default=1, help="turns of a conversation (default: 1)")
    parser.add_argument("--prompt", type=positive_int, default=512, help="new tokens of a turn (default: 512)")
    parser.add_argument("--output", type=positive_int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument("--pause", type=positive_float, default=10.0, help="seconds before the next turn (default: 10)")
    parser.add_argument(
        "--routing", choices=("load", "prefix"), default="load", help="the router's rule (default: load)"
    )
    parser.add_argument("--chunk", type=positive_int, default=512, help="tokens of a step (default: 512)")
    parser.add_argument(
        "--max-num-seqs", type=positive_int, default=64, help="running sequences of a machine (default: 64)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrivals (default: 0)")
    options = parser.parse_args()
    speed = Speed.from_record(json.loads(options.record.read_text()))
    traffic = Traffic(options.rate, options.conversations, options.turns, options.prompt, options.output, options.pause)
    for machines in options.machines:
        cluster = Cluster(
            speed,
            machines,
            traffic,
            by_prefix=options.routing == "prefix",
            chunk=options.chunk,
            max_num_seqs=options.max_num_seqs,
            seed=options.seed,
        )
        print(json.dumps(cluster.run()))


if __name__ == "__main__":
    main()
