"""GET /metrics with llama.cpp's names, for dashboards made for it; `server.metrics` has vLLM's.

The numbers are those of all models together, without labels. llama.cpp's number of drafts and its busy slots per step
are left out: the engine does not count them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from ferrule._engine.metrics import EngineMetrics
from ferrule.errors import EngineError
from ferrule.server.context import Context

PREFIX = "llamacpp:"
"""Prefix of the names, which selects this form."""
STARTED = "Process-Start-Time-Unix"
"""Header with the time at which the server started, in seconds since 1970."""


@dataclass(frozen=True)
class Row:
    """A metric of one engine; the values of all engines are added."""

    name: str
    kind: str
    help: str
    value: Callable[[EngineMetrics], float]


ROWS = (
    Row(
        "prompt_tokens_total", "counter", "Computed prompt tokens.", lambda m: m.prompt_tokens - m.cached_prompt_tokens
    ),
    Row(
        "prompt_tokens_cached_total",
        "counter",
        "Prompt tokens taken from the prefix cache or from another completion of the same prompt.",
        lambda m: m.cached_prompt_tokens,
    ),
    Row("prompt_seconds_total", "counter", "Seconds in prefill.", lambda m: m.prefill_seconds.sum),
    Row("tokens_predicted_total", "counter", "Tokens generated.", lambda m: m.generated_tokens),
    Row("tokens_predicted_seconds_total", "counter", "Seconds in decode.", lambda m: m.decode_seconds.sum),
    Row("n_decode_total", "counter", "Batched forward passes.", lambda m: m.steps),
    Row("spec_decode_num_draft_tokens_total", "counter", "Draft tokens.", lambda m: m.drafted_tokens),
    Row("spec_decode_num_accepted_tokens_total", "counter", "Accepted draft tokens.", lambda m: m.accepted_tokens),
    Row("requests_processing", "gauge", "Sequences that are running.", lambda m: m.running),
    Row("requests_deferred", "gauge", "Sequences in the queue.", lambda m: m.waiting),
)


@dataclass
class Rate:
    """Tokens per second of what was counted since the metrics were read before; 0 where nothing was."""

    tokens: float = 0.0
    seconds: float = 0.0

    def updated(self, tokens: float, seconds: float) -> float:
        """Returns the rate up to the given counters, which become those of the last reading."""
        rate = (tokens - self.tokens) / (seconds - self.seconds) if seconds > self.seconds else 0.0
        self.tokens, self.seconds = tokens, seconds
        return rate


def router(server: Context) -> APIRouter:
    """Creates the route."""
    routes = APIRouter()
    prefill, decode = Rate(), Rate()

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Returns the metrics."""
        found = list(_engines(server))
        sums = {row.name: sum(row.value(each) for each in found) for row in ROWS}
        lines = [line for row in ROWS for line in _lines(row.name, row.kind, row.help, sums[row.name])]
        rates = (
            ("prompt_tokens_seconds", prefill, "prompt_tokens_total", "prompt_seconds_total"),
            ("predicted_tokens_seconds", decode, "tokens_predicted_total", "tokens_predicted_seconds_total"),
        )
        for name, rate, tokens, seconds in rates:
            said = "Tokens per second since /metrics was read before."
            lines += _lines(name, "gauge", said, rate.updated(sums[tokens], sums[seconds]))
        said = "Most tokens of a prompt with its output so far."
        lines += _lines("n_tokens_max", "counter", said, server.counters.longest)
        body = "".join(lines).encode() + generate_latest(server.registry)
        return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST, STARTED: str(server.models.created)})

    return routes


def _engines(server: Context) -> Iterator[EngineMetrics]:
    for served in server.models.engines():
        try:
            yield served.llm.metrics()
        except EngineError:  # closed
            continue


def _lines(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    """Yields the lines of a metric in Prometheus' text format."""
    yield f"# HELP {PREFIX}{name} {text}\n"
    yield f"# TYPE {PREFIX}{name} {kind}\n"
    yield f"{PREFIX}{name} {value}\n"
