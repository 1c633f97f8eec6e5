"""GET /metrics: metrics of engines and requests in Prometheus' text format, with vLLM's names.

The engines count; this module reads their counters when /metrics is requested. Metrics that vLLM does not have:
threads, instruction set, bytes of weights read, and throttling by the container's CPU quota.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from ferrule._engine.energy import energy_log
from ferrule._engine.metrics import EngineMetrics, Histogram
from ferrule.errors import EngineError
from ferrule.server.context import Context
from ferrule.server.counters import ENGINE, LABELS
from ferrule.server.models import ServedModel

FORMATS = ("quantization", "kv_cache_dtype")
GAUGES = (
    ("num_requests_running", "running", "Sequences that are running."),
    ("num_requests_waiting", "waiting", "Sequences in the queue."),
)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    (
        "prompt_tokens_cached",
        "cached_prompt_tokens",
        "Prompt tokens taken from the prefix cache or from another completion of the same prompt.",
    ),
    ("generation_tokens", "generated_tokens", "Tokens generated."),
    ("num_preemptions", "preemptions", "Preempted sequences."),
    ("prefix_cache_queries", "prefix_queries_tokens", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits_tokens", "Prompt tokens found in the prefix cache."),
    ("prefix_cache_disk_hits", "disk_hits_tokens", "Prompt tokens found in the prefix cache on disk."),
    ("spec_decode_num_draft_tokens", "drafted_tokens", "Draft tokens."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Accepted draft tokens."),
    ("requests_refused", "requests_refused", "Requests refused, mostly because the queue was full."),
    ("engine_steps", "steps", "Batched forward passes."),
    ("computed_tokens", "computed_tokens", "Tokens computed by the model, in prefill and decode."),
)
HISTOGRAMS = (
    ("request_queue_time_seconds", "queue_seconds", "Seconds from arrival to the first scheduled step."),
    ("request_prefill_time_seconds", "prefill_seconds", "Seconds from the first scheduled step to the first token."),
    ("request_decode_time_seconds", "decode_seconds", "Seconds from the first token to the last."),
    ("time_to_first_token_seconds", "time_to_first_token_seconds", "Seconds from arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token_seconds", "Seconds between tokens of a sequence."),
    ("engine_step_seconds", "step_seconds", "Seconds of a step, or since the last one if steps overlap."),
    ("iteration_tokens_total", "step_tokens", "Tokens that a batched forward pass computes, in prefill and decode."),
)
"""Name at /metrics without the prefix, field of EngineMetrics, help. The names are vLLM's where it has the number."""
LOADS = (
    ("loads", "Loads on demand."),
    ("failed_loads", "Loads on demand that failed."),
    ("unloads", "Times that the model was unloaded."),
    ("load_seconds", "Seconds of all loads on demand."),
)
"""Name at /metrics after `model_`, which is the field of the model's entry, and help."""
PAGE_TOKENS = 16
"""Tokens of a page of the KV cache, which the engine's crate defines."""
CPU_STAT = ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat", "/sys/fs/cgroup/cpu,cpuacct/cpu.stat")
"""Files with the container's CPU statistics, of cgroup v2 and v1."""


def router(server: Context) -> APIRouter:
    """Creates the route."""
    routes = APIRouter()
    server.registry.register(EngineCollector(server))

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Returns the metrics."""
        return Response(generate_latest(server.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes


class _Snapshot(NamedTuple):
    """Step counters at a request of /metrics."""

    steps: int
    seconds: float
    """Total duration of the steps."""
    steps_per_second: float
    """Rate of the steps since the previous snapshot with steps."""

    def updated(self, found: EngineMetrics) -> _Snapshot:
        """Returns the snapshot of the current counters."""
        steps, seconds = found.steps, found.step_seconds.sum
        if steps < self.steps:  # the model was loaded again
            return _Snapshot(0, 0.0, 0.0).updated(found)
        if seconds <= self.seconds:
            return self
        return _Snapshot(steps, seconds, (steps - self.steps) / (seconds - self.seconds))


class EngineCollector(Collector):
    """Collects metrics of the engines and of the container."""

    def __init__(self, server: Context) -> None:
        self._models = server.models
        self._prefix = server.settings.metrics_prefix
        self._before: dict[str, _Snapshot] = {}
        """Last snapshot of each engine, by the name of the model."""

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics."""
        engines = list(self._engines())
        for name, field, text in GAUGES:
            yield self._family(GaugeMetricFamily, name, text, engines, lambda found, field=field: getattr(found, field))
        for name, field, text in COUNTERS:
            yield self._family(
                CounterMetricFamily, name, text, engines, lambda found, field=field: getattr(found, field)
            )
        for name, field, text in HISTOGRAMS:
            family = HistogramMetricFamily(self._prefix + name, text, labels=LABELS)
            for served, found in engines:
                histogram: Histogram = getattr(found, field)
                family.add_metric((served.name, ENGINE), buckets(histogram), histogram.sum)
            yield family
        yield self._family(
            GaugeMetricFamily,
            "kv_cache_usage_perc",
            "Fraction of the KV cache pages in use, from 0 to 1.",
            engines,
            lambda found: 1 - found.pages_free / found.pages_total if found.pages_total else 0,
        )
        yield self._cache_config(engines)
        yield from self._residency()
        yield from self._machine(engines)
        yield from self._throttling()
        yield from self._energy()

    def _engines(self) -> Iterator[tuple[ServedModel, EngineMetrics]]:
        for served in self._models.engines():
            try:
                yield served, served.llm.metrics()
            except EngineError:  # closed
                continue

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        engines: Sequence[tuple[ServedModel, EngineMetrics]],
        value: Callable[[EngineMetrics], float],
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=LABELS)
        for served, found in engines:
            family.add_metric((served.name, ENGINE), value(found))
        return family

    def _cache_config(self, engines: Sequence[tuple[ServedModel, EngineMetrics]]) -> Metric:
        """Returns the settings of the KV cache as labels, vLLM's where it has them."""
        names = ("block_size", "cache_dtype", "enable_prefix_caching", "num_cpu_blocks", "num_gpu_blocks")
        family = GaugeMetricFamily(
            f"{self._prefix}cache_config_info", "Settings of the KV cache; always 1.", labels=(*LABELS, *names)
        )
        for served, found in engines:
            info = served.info
            # As in vLLM's CPU backend, where `cpu` stands for swapped blocks.
            values = (PAGE_TOKENS, info["kv_cache_dtype"], info["enable_prefix_caching"], 0, found.pages_total)
            family.add_metric((served.name, ENGINE, *map(str, values)), 1)
        return family

    def _residency(self) -> Iterator[Metric]:
        entries = self._models.entries
        loaded = GaugeMetricFamily(f"{self._prefix}model_loaded", "Whether the model is loaded: 1 or 0.", labels=LABELS)
        for entry in entries:
            loaded.add_metric((entry.name, ENGINE), entry.llm is not None)
        yield loaded
        for name, text in LOADS:
            family = CounterMetricFamily(f"{self._prefix}model_{name}", text, labels=LABELS)
            for entry in entries:
                family.add_metric((entry.name, ENGINE), getattr(entry, name))
            yield family

    def _machine(self, engines: Sequence[tuple[ServedModel, EngineMetrics]]) -> Iterator[Metric]:
        threads = GaugeMetricFamily(f"{self._prefix}threads", "Number of threads of the engine.", labels=LABELS)
        read = CounterMetricFamily(
            f"{self._prefix}weight_bytes_read", "Bytes of weights read from memory (lower bound).", labels=LABELS
        )
        speed = GaugeMetricFamily(
            f"{self._prefix}weight_bytes_read_per_second",
            "Bytes of weights read from memory per second in the steps between the last two requests.",
            labels=LABELS,
        )
        about = GaugeMetricFamily(
            f"{self._prefix}engine_info",
            "Instruction set and number formats of the engine.",
            labels=(*LABELS, "isa", *FORMATS),
        )
        adapters = GaugeMetricFamily(f"{self._prefix}lora_adapters", "Number of loaded adapters.", labels=LABELS)
        for served, found in engines:
            labels, info = (served.name, ENGINE), served.info
            size: int = info["weight_bytes_per_token"]
            before = self._before.get(served.name, _Snapshot(0, 0.0, 0.0))
            snapshot = before.updated(found)
            self._before[served.name] = snapshot
            threads.add_metric(labels, info["threads"])
            read.add_metric(labels, found.steps * size)
            speed.add_metric(labels, snapshot.steps_per_second * size)
            about.add_metric((*labels, info["isa"], *(info[name] for name in FORMATS)), 1)
            adapters.add_metric(labels, len(served.llm.lora_adapters()))
        yield from (threads, read, speed, about, adapters)

    def _energy(self) -> Iterator[Metric]:
        """Yields the energy of the machine where it can be read."""
        log = energy_log()
        joules = None if log is None else log.mark()
        if joules is not None:
            text = (
                "Joules of the processors and the memory of the whole machine since the first engine step or request."
            )
            family = CounterMetricFamily(f"{self._prefix}energy_joules", text)
            family.add_metric((), joules)
            yield family

    def _throttling(self) -> Iterator[Metric]:
        stat = cpu_stat()
        if "nr_throttled" in stat:
            yield CounterMetricFamily(
                f"{self._prefix}cgroup_throttled_periods",
                "Periods in which the container's CPU quota was used up.",
                value=stat["nr_throttled"],
            )
            seconds = stat["throttled_usec"] / 1e6 if "throttled_usec" in stat else stat.get("throttled_time", 0) / 1e9
            yield CounterMetricFamily(
                f"{self._prefix}cgroup_throttled_seconds",
                "Seconds of throttling by the container's CPU quota.",
                value=seconds,
            )


def cpu_stat(paths: Sequence[str] = CPU_STAT) -> dict[str, int]:
    """Reads the container's CPU statistics; empty without such a file."""
    for path in paths:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        pairs = [line.split() for line in lines]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    return {}


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns the cumulative buckets that Prometheus expects."""
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True))
