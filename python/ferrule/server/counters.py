"""Prometheus counters of HTTP requests: finish reasons, latency and tokens."""

from __future__ import annotations

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram

from ferrule._engine.energy import energy_log
from ferrule.server.request_record import RequestRecord

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = tuple(2**power for power in range(18))
COMPLETIONS = (1, 2, 5, 10, 20, 50, 100)
LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of vLLM's label `engine`: each model has one engine."""


class RequestCounters:
    """Counters of one application, with vLLM's names."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self.longest = 0
        """Most tokens of a prompt with its output so far."""
        self._finished = Counter(
            f"{prefix}request_success",
            "Finished completions by finish reason.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{prefix}e2e_request_latency_seconds",
            "Seconds from the arrival of a request to its last token.",
            LABELS,
            registry=registry,
            buckets=SECONDS,
        )
        self._prompt = Histogram(
            f"{prefix}request_prompt_tokens", "Number of tokens of a prompt.", LABELS, registry=registry, buckets=TOKENS
        )
        self._generated = Histogram(
            f"{prefix}request_generation_tokens",
            "Number of tokens generated for a prompt.",
            LABELS,
            registry=registry,
            buckets=TOKENS,
        )
        self._n = Histogram(
            f"{prefix}request_params_n",
            "Number of completions that a request asks for.",
            LABELS,
            registry=registry,
            buckets=COMPLETIONS,
        )
        self._max_tokens = Histogram(
            f"{prefix}request_params_max_tokens",
            "Maximum number of tokens that a request asks for, where it has one.",
            LABELS,
            registry=registry,
            buckets=TOKENS,
        )
        self._fallbacks = Counter(
            f"{prefix}fallback_requests",
            "Requests that the fallback server answered, by reason.",
            ("reason",),
            registry=registry,
        )
        self._failed_fallbacks = Counter(
            f"{prefix}fallback_failures",
            "Requests that the fallback server did not answer, by reason.",
            ("reason",),
            registry=registry,
        )
        self._joules: dict[str, Counter] = {}
        if energy_log() is not None:
            for phase in ("prefill", "decode"):
                self._joules[phase] = Counter(
                    f"{prefix}request_{phase}_joules",
                    f"Joules of the whole machine during the {phase} of requests; concurrent requests count them each.",
                    LABELS,
                    registry=registry,
                )
        self._responses = Counter(
            f"{prefix}http_requests",
            "HTTP responses by status; 499 where the client disconnected.",
            ("status",),
            registry=registry,
        )

    def count_fallback(self, reason: str, *, answered: bool) -> None:
        """Counts a request that the fallback server answered, or failed to answer."""
        (self._fallbacks if answered else self._failed_fallbacks).labels(reason).inc()

    def observe(self, record: RequestRecord, status: int) -> None:
        """Counts a request that has ended."""
        self._responses.labels(str(status)).inc()
        if record.model is None:
            return
        labels = (record.model, ENGINE)
        for each in record.prompts:
            if each.prompt_tokens is not None:
                self.longest = max(self.longest, each.prompt_tokens + each.output_tokens)
                self._prompt.labels(*labels).observe(each.prompt_tokens)
                self._generated.labels(*labels).observe(each.output_tokens)
            for phase, counter in self._joules.items():
                joules = None if each.metrics is None else getattr(each.metrics, f"{phase}_joules")
                if joules is not None:
                    counter.labels(*labels).inc(joules)
            if each.params is not None:
                self._n.labels(*labels).observe(each.params.n)
            if each.params is not None and each.params.max_tokens is not None:
                self._max_tokens.labels(*labels).observe(each.params.max_tokens)
            for reason in each.finish_reasons:
                self._finished.labels(*labels, reason).inc()
        if record.prompts:
            self._seconds.labels(*labels).observe(perf_counter() - record.arrival)
