"""What is counted of HTTP requests: how they ended, how long they took, and how much they asked and got."""

from __future__ import annotations

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram

from ferrule.server.request_record import RequestRecord

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = tuple(2**power for power in range(18))
LABELS = ("model_name", "engine")
ENGINE = "0"
"""Of vLLM's label `engine`: a model has one here."""


class RequestCounters:
    """The counters of one application; the names are vLLM's."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._finished = Counter(
            f"{prefix}request_success",
            "Completions by how they ended.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{prefix}e2e_request_latency_seconds",
            "From arrival to the last token.",
            LABELS,
            registry=registry,
            buckets=SECONDS,
        )
        self._prompt = Histogram(
            f"{prefix}request_prompt_tokens", "Tokens of a prompt.", LABELS, registry=registry, buckets=TOKENS
        )
        self._generated = Histogram(
            f"{prefix}request_generation_tokens",
            "Tokens generated for a prompt.",
            LABELS,
            registry=registry,
            buckets=TOKENS,
        )
        self._answers = Counter(
            f"{prefix}http_requests",
            "Answers by status; 499 where the client had gone.",
            ("status",),
            registry=registry,
        )

    def note(self, record: RequestRecord, status: int) -> None:
        """Takes in a request that has ended."""
        self._answers.labels(str(status)).inc()
        if record.model is None:
            return
        labels = (record.model, ENGINE)
        for each in record.prompts:
            if each.prompt_tokens is not None:
                self._prompt.labels(*labels).observe(each.prompt_tokens)
                self._generated.labels(*labels).observe(each.output_tokens)
            for reason in each.finish_reasons:
                self._finished.labels(*labels, reason).inc()
        if record.prompts:
            self._seconds.labels(*labels).observe(perf_counter() - record.arrival)
