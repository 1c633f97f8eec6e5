"""Spans of requests as received by a collector."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import fakes
from ferrule.server import ServerSettings
from server.live import serving

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Span]]]:
    """Starts a collector; gives its URL and the received spans."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


def test_each_request_has_a_span(engine: type[fakes.Engine], collector: tuple[str, list[Span]]) -> None:
    url, spans = collector
    with serving(ServerSettings(otlp_traces_endpoint=url)) as live:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "X-Request-Id": "mine"}
        body = {"prompt": "A secret", "max_tokens": 5, "stream": True}
        assert live.request("/v1/completions", body, headers=headers).status == 200
        assert live.chat(temperature=-1).status == 400
    # Pending spans are sent when the server ends.
    first = next(span for span in spans if span.trace_id.hex() == TRACE)
    found = {attribute.key: attribute.value for attribute in first.attributes}
    assert found["gen_ai.request.id"].string_value == "mine"
    assert found["gen_ai.request.model"].string_value == "tiny"
    assert found["gen_ai.usage.output_tokens"].int_value == 5
    assert found["gen_ai.latency.time_to_first_token"].double_value > 0
    assert first.end_time_unix_nano > first.start_time_unix_nano
    assert "secret" not in str(spans)
    assert any(span.status.message == "invalid_value" for span in spans)
