"""GET /metrics: what engines and requests have done, in Prometheus' text format and with vLLM's names.

The engines count by themselves; here is only asked for it, when somebody looks. What a processor's engine has and an
accelerator's has not: threads, instruction set, bytes of weights read, and how often the container's quota held it up.
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

from ferrule._engine.metrics import EngineMetrics, Histogram
from ferrule.errors import EngineError
from ferrule.server.context import Context
from ferrule.server.counters import ENGINE, LABELS
from ferrule.server.models import ServedModel

FORMATS = ("quantization", "kv_cache_dtype")
GAUGES = (
    ("num_requests_running", "running", "Sequences that hold pages."),
    ("num_requests_waiting", "waiting", "Sequences that wait."),
)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts, once computed."),
    ("prompt_tokens_cached", "cached_prompt_tokens", "Of these, taken from the prefix cache or a sibling."),
    ("generation_tokens", "generated_tokens", "Tokens generated."),
    ("num_preemptions", "preemptions", "Sequences that gave their pages up for others."),
    ("prefix_cache_queries", "prefix_queries_tokens", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits_tokens", "Of these, found."),
    ("prefix_cache_disk_hits", "disk_hits_tokens", "Of these, read from the disk."),
    ("spec_decode_num_draft_tokens", "drafted_tokens", "Tokens guessed and verified."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Of these, sampled indeed."),
    ("requests_refused", "requests_refused", "For want of room, most of all."),
    ("engine_steps", "steps", "Batched forward passes."),
    ("computed_tokens", "computed_tokens", "Through the model, in prefill and decode."),
)
HISTOGRAMS = (
    ("request_queue_time_seconds", "queue_seconds", "From arrival until first scheduled."),
    ("request_prefill_time_seconds", "prefill_seconds", "From there to the first token."),
    ("request_decode_time_seconds", "decode_seconds", "From the first token to the last."),
    ("time_to_first_token_seconds", "time_to_first_token_seconds", "From arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token_seconds", "Between tokens of a sequence."),
    ("engine_step_seconds", "step_seconds", "Of a batched forward pass."),
)
"""Name at /metrics without the prefix, field of EngineMetrics, help. The names are vLLM's where it has the number."""
CPU_STAT = ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat", "/sys/fs/cgroup/cpu,cpuacct/cpu.stat")
"""Of the container: in cgroup v2, and where v1 has it."""


def router(server: Context) -> APIRouter:
    """The route."""
    routes = APIRouter()
    server.registry.register(EngineCollector(server))

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(generate_latest(server.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes


class _Snapshot(NamedTuple):
    """What was known when somebody looked."""

    steps: int
    seconds: float
    """That all steps took."""
    steps_per_second: float
    """Of the steps since the look before; where there were none, of those before that."""

    def again(self, found: EngineMetrics) -> _Snapshot:
        """What is known now."""
        steps, seconds = found.steps, found.step_seconds.sum
        if seconds <= self.seconds:
            return self
        return _Snapshot(steps, seconds, (steps - self.steps) / (seconds - self.seconds))


class EngineCollector(Collector):
    """Asks the engines, and the kernel, when it is asked."""

    def __init__(self, server: Context) -> None:
        self._models = server.models
        self._prefix = server.settings.metrics_prefix
        self._before: dict[str, _Snapshot] = {}
        """Of each engine, by its name."""

    def collect(self) -> Iterator[Metric]:
        """All families of metrics."""
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
            "Share of the cache's pages that requests hold, from 0 to 1.",
            engines,
            lambda found: 1 - found.pages_free / found.pages_total if found.pages_total else 0,
        )
        yield from self._machine(engines)
        yield from self._throttling()

    def _engines(self) -> Iterator[tuple[ServedModel, EngineMetrics]]:
        for served in self._models.engines():
            try:
                yield served, served.llm.metrics()
            except EngineError:  # closed: it has nothing to say any more
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

    def _machine(self, engines: Sequence[tuple[ServedModel, EngineMetrics]]) -> Iterator[Metric]:
        threads = GaugeMetricFamily(f"{self._prefix}threads", "Threads of the engine.", labels=LABELS)
        read = CounterMetricFamily(
            f"{self._prefix}weight_bytes_read", "Bytes of weights read from memory, at least.", labels=LABELS
        )
        speed = GaugeMetricFamily(
            f"{self._prefix}weight_bytes_read_per_second",
            "Likewise, in each second of the last steps that somebody looked at.",
            labels=LABELS,
        )
        about = GaugeMetricFamily(
            f"{self._prefix}engine_info", "Instruction set and formats.", labels=(*LABELS, "isa", *FORMATS)
        )
        adapters = GaugeMetricFamily(f"{self._prefix}lora_adapters", "Adapters that are loaded.", labels=LABELS)
        for served, found in engines:
            labels, info = (served.name, ENGINE), served.info
            size: int = info["weight_bytes_per_token"]
            before = self._before.get(served.name, _Snapshot(0, 0.0, 0.0))
            snapshot = before.again(found)
            self._before[served.name] = snapshot
            threads.add_metric(labels, info["threads"])
            read.add_metric(labels, found.steps * size)
            speed.add_metric(labels, snapshot.steps_per_second * size)
            about.add_metric((*labels, info["isa"], *(info[name] for name in FORMATS)), 1)
            adapters.add_metric(labels, len(served.llm.lora_adapters()))
        yield from (threads, read, speed, about, adapters)

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
                f"{self._prefix}cgroup_throttled_seconds", "How long it waited for more.", value=seconds
            )


def cpu_stat(paths: Sequence[str] = CPU_STAT) -> dict[str, int]:
    """What the kernel says of the container's CPU time; nothing where there is no such file."""
    for path in paths:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        pairs = [line.split() for line in lines]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    return {}


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True))
