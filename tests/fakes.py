"""A fake of `ferrule._native` in Python, with the same interface and predictable arithmetic.

The logits after a token depend on it and on its position alone, so a request's tokens do not depend on its neighbours.
`install()` puts it in place of the native module.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fake_arithmetic import logits, logprobs_of, pick, scores_after, trace_of
from fake_values import Grammar, LoraAdapter, SampleTrace, StepOutput, TokenLogprobs, Vocabulary
from ferrule._params.logits_processors import LogitsProcessors
from ferrule.errors import EngineError, InvalidParameterError, QueueFullError

MAX_MODEL_LEN = 2048
PAGE = 16
"""Number of tokens in a page of the prefix cache."""
GATE_SECONDS = 60.0
"""Seconds after which a step fails whose gate a test does not open."""
SLOW_SECONDS = 0.5
"""Seconds of a slow step."""
HISTOGRAMS = ("queue", "prefill", "time_to_first_token", "inter_token", "decode", "step")
BOUNDS = [0.001, 0.01, 0.1, 1.0]


@dataclass
class _Sequence:
    prompt: list[int]
    params: dict[str, Any]
    fork_of: int | None = None
    lora: LoraAdapter | None = None
    output: list[int] = field(default_factory=list[int])
    arrival: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    """When, after the arrival; None while it waits."""
    computed: int = 0
    """Number of prompt tokens."""
    cached: int = 0
    first: float | None = None
    last: float | None = None
    prefilled: float | None = None

    def now(self) -> float:
        return time.perf_counter() - self.arrival


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[sum(bound < value for bound in BOUNDS)] += 1
        self.sum += value

    def shown(self) -> dict[str, Any]:
        return {"bounds": BOUNDS, "counts": self.counts, "sum": self.sum, "count": sum(self.counts)}


class Engine:
    """A deterministic engine; `script` sets its output by prompt."""

    script: Callable[[list[int]], list[int]] | None = None
    """Returns the output tokens for a prompt; token 2 follows them."""
    step_seconds = 0.0
    slow_after: int | None = None
    """Number of finished requests after which steps are slow."""
    gate: threading.Event | None = None
    """Events that steps and encoding wait for."""
    interrupt_at: int | None = None
    """Number of the step that raises KeyboardInterrupt once, before it changes any state."""
    error_at: int | None = None
    """Number of the step that ends every request with an error."""
    dies_at: int | None = None
    """Number of the step in which the engine dies."""
    bad_prompt: list[int] | None = None
    """Prompt whose request ends with an error."""
    max_num_seqs = 1 << 30
    """Default of max_num_seqs."""
    state_bytes = 0
    """Bytes of the states of one sequence."""
    load_lora_seconds = 0.0
    prefill_chunk = 1 << 30
    """Maximum number of prompt tokens in a step."""

    def __init__(
        self,
        spec: str,
        weights: str,
        options: str,
        progress: Callable[[int, int], None] | None = None,
        draft: tuple[str, str | None, str] | None = None,
        stages: list[int] | None = None,
    ) -> None:
        self.draft, self.stages = draft, stages
        self.spec: dict[str, Any] = json.loads(spec)
        self.options: dict[str, Any] = json.loads(options)
        self.vocab_size: int = self.spec["vocab_size"]
        context: int = self.options["max_model_len"] or self.spec["max_position_embeddings"]
        self.max_model_len = min(context, MAX_MODEL_LEN)
        self.running: dict[int, _Sequence] = {}
        """Number of requests, including queued ones."""
        self.forks: list[tuple[int, int]] = []
        """Waiting requests, each with its parent."""
        self.aborted: list[int] = []
        self.loras: list[LoraAdapter | None] = []
        self.grammars: list[Grammar | None] = []
        """Parameters of every request."""
        self.lora_loads: list[str] = []
        self.encoded: list[tuple[list[list[int]], str]] = []
        """Texts and task of each encoding call."""
        self.dead = False
        self.closed = False
        self.cache: set[tuple[str | None, tuple[int, ...]]] = set()
        self.counters = dict.fromkeys(
            ("requests_refused", "prompt_tokens", "cached_prompt_tokens", "computed_tokens", "generated_tokens"), 0
        )
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.histograms = {name: _Histogram() for name in HISTOGRAMS}
        self.step_tokens = _Histogram()
        self.next_id = 0
        self.steps = 0
        self.stepping = False
        if progress is not None:
            for done in (0, 50, 100):
                progress(done, 100)

    def load_lora(self, directory: str, config: str) -> LoraAdapter:
        self._alive()
        if self.closed:
            raise EngineError("the engine is closed")
        time.sleep(self.load_lora_seconds)
        self.lora_loads.append(directory)
        given = json.loads(config)
        return LoraAdapter(given["rank"], [f"model.layers.0.{target}" for target in given["targets"]])

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: str,
        fork_of: int | None = None,
        lora: LoraAdapter | None = None,
        logits_processors: LogitsProcessors | None = None,
        grammar: Grammar | None = None,
        features: Sequence[tuple[int, int, bytes]] = (),
    ) -> int:
        assert not features, "the fake reads text only"
        self._alone()
        self._alive()
        limit = self.options["max_queued_requests"]
        waiting = self._waiting()
        if limit is not None and waiting >= limit + self._places() - (len(self.running) - waiting):
            self.counters["requests_refused"] += 1
            raise QueueFullError(
                f"the request queue is full ({waiting} waiting; the limit is max_queued_requests {limit})"
            )
        if fork_of is not None:
            origin = self.running.get(fork_of)
            if not 1 <= fork_of <= self.next_id or (origin is not None and origin.prompt != prompt_token_ids):
                raise InvalidParameterError("fork_of", fork_of, "a request with the same prompt")
        self.next_id += 1
        if fork_of is not None:
            self.forks.append((self.next_id, fork_of))
        self.running[self.next_id] = _Sequence(prompt_token_ids, json.loads(params), fork_of, lora)
        self.loras.append(lora)
        self.grammars.append(grammar)
        return self.next_id

    def step(self) -> list[StepOutput]:
        self._alone()
        self._alive()
        self.steps += 1
        if self.interrupt_at == self.steps:
            raise KeyboardInterrupt
        began = time.perf_counter()
        self._schedule()
        self._sleep()
        if self.dies_at == self.steps:
            return self._die()
        scheduled = [(key, sequence) for key, sequence in self.running.items() if sequence.scheduled is not None]
        outputs = [output for key, sequence in scheduled if (output := self._advance(key, sequence)) is not None]
        for output in outputs:
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason)
        self.histograms["step"].add(time.perf_counter() - began)
        self.step_tokens.add(len(outputs))
        return outputs

    def abort(self, request_id: int) -> bool:
        self._alone()
        self.aborted.append(request_id)
        if request_id not in self.running:
            return False
        self._finish(request_id, "abort")
        return True

    def metrics(self) -> str:
        waiting = self._waiting()
        prompt_tokens, cached = self.counters["prompt_tokens"], self.counters["cached_prompt_tokens"]
        numbers: dict[str, Any] = {
            "requests_finished": self.finished,
            **self.counters,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "steps": self.steps,
            "preemptions": 0,
            "running": len(self.running) - waiting,
            "waiting": waiting,
            "pages_total": 4096,
            "pages_free": 4096,
            "pages_cached": len(self.cache),
            "prefix_queries_tokens": prompt_tokens,
            "prefix_hits_tokens": cached,
            "disk_hits_tokens": 0,
            "disk_stored_bytes": 0,
            **{f"{name}_seconds": histogram.shown() for name, histogram in self.histograms.items()},
            "step_tokens": self.step_tokens.shown(),
        }
        return json.dumps(numbers)

    def save_state(self, token_ids: list[int], cache_salt: str | None, lora: LoraAdapter | None = None) -> bytes:
        self._alone()
        self._alive()
        self._remember(cache_salt, token_ids)
        return json.dumps({"model": self.spec, "token_ids": token_ids, "cache_salt": cache_salt}).encode()

    def restore_state(self, state: bytes) -> tuple[list[int], int]:
        self._alone()
        self._alive()
        if not self.options["enable_prefix_caching"]:
            raise InvalidParameterError("enable_prefix_caching", False, "true to restore a saved state")
        try:
            given = json.loads(state)
            token_ids, salt, model = given["token_ids"], given["cache_salt"], given["model"]
        except (ValueError, TypeError, KeyError):
            raise InvalidParameterError("state", None, "a state that this model saved (not a state)") from None
        if model != self.spec:
            raise InvalidParameterError("state", None, "a state that this model saved (the model is another one)")
        self._remember(salt, token_ids)
        return token_ids, self._cached(salt, token_ids)

    def has_unfinished_requests(self) -> bool:
        self._alone()
        return bool(self.running)

    def logits(self, token_ids: list[int], lora: LoraAdapter | None = None, first: int = 0) -> bytearray:
        self._alone()
        rows = [logits(token, position, self.vocab_size) for position, token in enumerate(token_ids)][first:]
        return bytearray(b"".join(struct.pack(f"<{self.vocab_size}f", *row) for row in rows))

    def encode(self, texts: list[tuple[list[int], list[int], str | None]], task: str) -> bytearray:
        """Returns numbers for each text that depend only on the text and the task."""
        self._alone()
        self._alive()
        self.encoded.append(([ids for ids, _, _ in texts], task))
        self._sleep()
        wanted: dict[str, Any] = json.loads(task)
        numbers = bytearray()
        for ids, kinds, _ in texts:
            if ids == self.bad_prompt:
                raise EngineError("model output for text 0 is not finite (NaN or infinity)")
            count = self._numbers(wanted, len(ids))
            generator = random.Random(f"{ids} {kinds} {wanted.get('pooling')}")
            row = [generator.gauss(0, 1) for _ in range(count)]
            length = math.hypot(*row) if wanted.get("normalize") else 1.0
            numbers += struct.pack(f"<{count}f", *(number / length for number in row))
        return numbers

    def _numbers(self, task: dict[str, Any], tokens: int) -> int:
        hidden = self.spec["hidden_size"]
        match task["type"]:
            case "embedding":
                return task["dimensions"] or hidden
            case "token_embeddings":
                return tokens * hidden
            case "scores":
                return self.spec["classifier"]["labels"]
            case _:
                return len(task["tokens"])

    def close(self) -> None:
        if not self.closed:
            self._alone()
        self.closed = True
        self.running.clear()

    def info(self) -> str:
        return json.dumps(
            {
                "isa": "fake",
                "threads": self.options["threads"] or 1,
                "numa_nodes": 1,
                "quantization": "int8" if self.options["quantization"] == "auto" else self.options["quantization"],
                "kv_cache_dtype": self.options["kv_cache_dtype"],
                "weight_bytes": 20_000_000,
                "weight_bytes_by_format": {"int8": 20_000_000},
                "weight_bytes_per_token": 20_000_000,
                "layer_parameters": 4_000_000,
                "layer_parameters_per_token": 4_000_000,
                "parameters": 5_000_000,
                "kv_bytes_per_token": 16,
                "kv_windows": [{"window": None, "bytes_per_token": 10}, {"window": 32, "bytes_per_token": 6}],
                "state_bytes": self.state_bytes,
                "kv_cache_tokens": 4096,
                "max_model_len": self.max_model_len,
                "max_num_seqs": self._places(),
                "max_queued_requests": self.options["max_queued_requests"],
                "max_num_batched_tokens": 512,
                "enable_prefix_caching": self.options["enable_prefix_caching"],
            }
        )

    def _waiting(self) -> int:
        # Copying the values is one call of C code, during which no other thread can change them.
        return sum(sequence.scheduled is None for sequence in list(self.running.values()))

    def _places(self) -> int:
        return self.options["max_num_seqs"] or self.max_num_seqs

    def _sleep(self) -> None:
        slow = self.slow_after is not None and sum(self.finished.values()) >= self.slow_after
        seconds = SLOW_SECONDS if slow else self.step_seconds
        if seconds or self.gate is not None:
            self.stepping = True
            try:
                time.sleep(seconds)
                if self.gate is not None and not self.gate.wait(GATE_SECONDS):
                    raise AssertionError("the gate was not opened")
            finally:
                self.stepping = False

    def _alive(self) -> None:
        if self.dead:
            raise EngineError("the engine is dead: a worker panicked")

    def _die(self) -> list[StepOutput]:
        self.dead = True
        doomed, self.running = list(self.running), {}
        return [StepOutput(key, [], "error", error="the engine died: a worker panicked") for key in doomed]

    def _schedule(self) -> None:
        """Schedules waiting requests by priority; a fork waits until its parent's prompt is computed."""
        room = self._places() - (len(self.running) - self._waiting())
        order = sorted(self.running, key=lambda key: (self.running[key].params["priority"], key))
        for key in order:
            sequence = self.running[key]
            origin = None if sequence.fork_of is None else self.running.get(sequence.fork_of)
            if sequence.scheduled is not None or (origin is not None and origin.computed < len(origin.prompt)):
                continue
            if room <= 0:
                return
            room -= 1
            salt, params = sequence.params["cache_salt"], sequence.params
            sequence.cached = self._cached(salt, sequence.prompt[:-1]) if sequence.fork_of is None else 0
            if sequence.fork_of is not None:
                sequence.cached = len(sequence.prompt) - 1
            if params["prompt_logprobs"] is not None:
                sequence.cached = min(sequence.cached, params["prompt_logprobs_from"] - 1)
            sequence.computed = sequence.cached
            sequence.scheduled = sequence.now()
            self.counters["prompt_tokens"] += len(sequence.prompt)
            self.counters["cached_prompt_tokens"] += sequence.cached
            self.histograms["queue"].add(sequence.scheduled)

    def _finish(self, request_id: int, reason: str) -> None:
        sequence = self.running.pop(request_id)
        self.finished[reason] += 1
        if reason != "error" and sequence.computed == len(sequence.prompt):
            self._remember(sequence.params["cache_salt"], [*sequence.prompt, *sequence.output[:-1]])
        if sequence.first is not None and sequence.last is not None:
            self.histograms["decode"].add(sequence.last - sequence.first)

    def _remember(self, salt: str | None, token_ids: list[int]) -> None:
        if self.options["enable_prefix_caching"]:
            ends = range(PAGE, len(token_ids) + 1, PAGE)
            self.cache.update((salt, tuple(token_ids[:end])) for end in ends)

    def _cached(self, salt: str | None, token_ids: list[int]) -> int:
        """Returns the tokens of whole pages."""
        end = 0
        while end + PAGE <= len(token_ids) and (salt, tuple(token_ids[: end + PAGE])) in self.cache:
            end += PAGE
        return end

    def _alone(self) -> None:
        if self.stepping:
            raise EngineError("called by two threads at once")
        if self.closed:
            raise EngineError("the engine is closed")

    def _advance(self, request_id: int, sequence: _Sequence) -> StepOutput | None:
        if self.error_at == self.steps or sequence.prompt == self.bad_prompt:
            return StepOutput(request_id, [], "error", error="logits are not finite")
        prompt_logprobs: list[TokenLogprobs] = []
        if sequence.computed < len(sequence.prompt):
            prompt_logprobs = self._prefill(sequence)
            if sequence.computed < len(sequence.prompt):
                if not (prompt_logprobs or sequence.params["prompt_progress"]):
                    return None
                return StepOutput(request_id, [], prompt_logprobs=prompt_logprobs, **self._timing(sequence))
        output = self._say(request_id, sequence)
        now = sequence.now()
        self.counters["generated_tokens"] += 1
        self.counters["computed_tokens"] += 1
        if sequence.first is None or sequence.last is None:
            sequence.first = now
            self.histograms["time_to_first_token"].add(now)
            self.histograms["prefill"].add(now - (sequence.scheduled or 0))
        else:
            self.histograms["inter_token"].add(now - sequence.last)
        sequence.last = now
        return replace(output, prompt_logprobs=prompt_logprobs, **self._timing(sequence))

    def _prefill(self, sequence: _Sequence) -> list[TokenLogprobs]:
        start, prompt, params = sequence.computed, sequence.prompt, sequence.params
        sequence.computed = end = min(start + self.prefill_chunk, len(prompt))
        sequence.prefilled = sequence.now()
        self.counters["computed_tokens"] += end - start
        if end == len(prompt):
            self._remember(params["cache_salt"], prompt)
        if params["prompt_logprobs"] is None:
            return []
        positions = range(max(start + 1, params["prompt_logprobs_from"]), min(end + 1, len(prompt)))
        return [
            logprobs_of(scores_after(prompt[p - 1], p - 1, self.vocab_size), prompt[p], params["prompt_logprobs"])
            for p in positions
        ]

    @staticmethod
    def _timing(sequence: _Sequence) -> dict[str, Any]:
        return {
            "queued_seconds": sequence.scheduled,
            "first_token_seconds": sequence.first,
            "last_token_seconds": sequence.last,
            "cached_tokens": sequence.cached,
            "processed_tokens": min(sequence.computed, len(sequence.prompt)),
            "last_prefill_seconds": sequence.prefilled,
        }

    def _say(self, request_id: int, sequence: _Sequence) -> StepOutput:
        params = sequence.params
        said = len(sequence.output)
        logprobs: list[TokenLogprobs] = []
        trace: list[SampleTrace] = []
        if self.script is not None:
            script = type(self).script(sequence.prompt)  # type: ignore[misc]
            token = script[said] if said < len(script) else 2
            scores = {token: 1.0, 0: -1.0}
        else:
            last, position = [*sequence.prompt, *sequence.output][-1], len(sequence.prompt) + said - 1
            scores = scores_after(last, position, self.vocab_size)
            draw = random.Random(f"{params['seed']} {said}").random() if params["temperature"] else None
            token = pick(scores, params["temperature"], draw)
        if params["logprobs"] is not None:
            logprobs = [logprobs_of(scores, token, params["logprobs"])]
        if params["trace"] is not None:
            trace = [trace_of(scores, token, params)]
        entropies = [math.log(len(scores))] if params["entropy"] else []
        sequence.output.append(token)
        if token in params["stop_token_ids"] and said + 1 > params["min_tokens"]:
            return StepOutput(request_id, [token], "stop", token, logprobs=logprobs, entropies=entropies, trace=trace)
        finish = "length" if said + 1 >= params["max_tokens"] else None
        return StepOutput(request_id, [token], finish, logprobs=logprobs, entropies=entropies, trace=trace)


def measure(spec: str, weights: str | None, options: str) -> str:
    """Information about the engine, with round numbers for its memory."""
    wanted: int = json.loads(options)["max_model_len"] or json.loads(spec)["max_position_embeddings"]
    memory = {
        "weights": 20_000_000,
        "vectors": 1000,
        "kv_cache": 16 * wanted,
        "buffers": 1_000_000,
        "needed": 21_001_000 + 16 * wanted,
        "available": 1 << 30,
        "holds_tokens": wanted,
    }
    engine = Engine(spec, weights or "", options)
    figures: dict[str, Any] = {
        "parameters_per_token": 5_000_000,
        "checkpoint_bytes": None if weights is None else 10_000_000,
        "mapped_bytes": 0,
    }
    figures["stored_types"] = None if weights is None else {"BF16": {"tensors": 56, "bytes": 10_000_000}}
    return json.dumps({**json.loads(engine.info()), **figures, "max_model_len": wanted, "memory": memory})


class PackedFile:
    """A packed file without tensors."""

    def __init__(self, path: str) -> None:
        self.tensors: list[str] = []


class Ceilings:
    """Probes of a machine with round numbers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    read_bytes = 1 << 30
    measured = 0

    def measure(self, *, alone: bool = False) -> tuple[float, float, float, float]:
        Ceilings.measured += 1
        threads = 1 if alone else self.threads
        return 20e9, 1000e9 * threads, 100e9 * threads, 5e9 * threads


def module(engine: type[Engine] = Engine) -> types.ModuleType:
    """Creates a module with the interface of `ferrule._native`."""
    native = types.ModuleType("ferrule._native")
    native.__dict__.update(Engine=engine, Ceilings=Ceilings, Vocabulary=Vocabulary, measure=measure, version="0.0.0")
    native.__dict__.update(isa=lambda: "fake", cpu_count=lambda: 2, PackedFile=PackedFile)
    native.__dict__.update(check_tokenizer_json=lambda _: None, check_charsmap=lambda _: None)
    return native


def install() -> None:
    """Installs the fake as `ferrule._native`, for programs that tests start."""
    import ferrule

    sys.modules["ferrule._native"] = ferrule.__dict__["_native"] = module()
