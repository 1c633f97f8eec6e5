"""OpenTelemetry spans of requests (`pip install ferrule[otel]`).

Attributes follow the semantic conventions for generative AI, and vLLM's for times. They never contain prompts or
outputs. The header `traceparent` of a request is the parent of its span.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ferrule.errors import InvalidParameterError
from ferrule.server.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter


class Tracing:
    """Creates spans; the exporter sends them in its own thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider: TracerProvider = TracerProvider(resource=Resource.create({"service.name": "ferrule"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ferrule.server")
        self._context = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str | None) -> Tracing | None:
        """Creates a tracing that sends spans over HTTP (OTLP); None without an endpoint.

        Raises InvalidParameterError where OpenTelemetry is not installed.
        """
        if endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ModuleNotFoundError as error:
            limit = f"left out without {error.name}: pip install 'ferrule[otel]'"
            raise InvalidParameterError("otlp_traces_endpoint", endpoint, limit) from error
        return cls(OTLPSpanExporter(endpoint=endpoint))

    def close(self) -> None:
        """Sends all remaining spans and waits until they are sent."""
        self._provider.shutdown()

    def export(self, record: RequestRecord, traceparent: str | None, path: str, status: int) -> None:
        """Exports the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.time_ns()
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        span = self._tracer.start_span(
            "llm_request",
            self._context.extract(carrier),
            SpanKind.SERVER,
            start_time=now - int((time.perf_counter() - record.arrival) * 1e9),
            attributes={**_attributes(record), "url.path": path, "http.response.status_code": status},
        )
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(now)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {"gen_ai.request.id": record.request_id}
    if record.model is not None:
        attributes["gen_ai.request.model"] = record.model
    if record.prompts:
        attributes["gen_ai.usage.input_tokens"] = sum(each.prompt_tokens or 0 for each in record.prompts)
        attributes["gen_ai.usage.output_tokens"] = sum(each.output_tokens for each in record.prompts)
        attributes["gen_ai.response.finish_reasons"] = [
            reason for each in record.prompts for reason in each.finish_reasons
        ]
    metrics = [each.metrics for each in record.prompts if each.metrics is not None]
    if metrics:
        times = {
            "gen_ai.latency.time_in_queue": metrics[0].queue_time,
            "gen_ai.latency.time_in_model_prefill": metrics[0].prefill_time,
            "gen_ai.latency.time_in_model_decode": metrics[0].decode_time,
            "gen_ai.latency.time_to_first_token": metrics[0].time_to_first_token,
            "gen_ai.latency.e2e": metrics[0].total_time,
        }
        attributes |= {name: seconds for name, seconds in times.items() if seconds is not None}
    return attributes
