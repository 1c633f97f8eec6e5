"""Requests that the server cannot serve, which a second server answers in its place."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import fakes
from ferrule import AsyncLLM
from ferrule.errors import InvalidParameterError, ModelFileError
from ferrule.server import OnDemand, ServerSettings
from ferrule.server.middleware import admission
from server.live import Answer, events, serving, until

SERVED_BY = "X-Ferrule-Served-By"
LONG = "word " * 3000


class Cloud:
    """A second server, which records its requests."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.status = 200
        self.pieces: list[bytes] = [b'{"id": "from-the-cloud"}']
        self.kind = "application/json"
        self.gate = threading.Event()
        """Sends the pieces after the first one."""
        self.gate.set()
        self.closed = threading.Event()
        """Set when a client has disconnected before the end."""
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                cloud.received.append((self.path, dict(self.headers), json.loads(body)))
                self.send_response(cloud.status)
                self.send_header("Content-Type", cloud.kind)
                self.send_header("Retry-After", "7")
                self.send_header("Set-Cookie", "secret=1")
                self.end_headers()
                try:
                    for index, piece in enumerate(cloud.pieces):
                        if index and not cloud.gate.wait(60):
                            return
                        self.wfile.write(piece)
                        self.wfile.flush()
                except OSError:
                    cloud.closed.set()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    found = Cloud()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.gate.set()
        found.server.shutdown()
        found.server.server_close()
        thread.join(60)


def settings(cloud: Cloud, **others: Any) -> ServerSettings:
    return ServerSettings(fallback_url=cloud.url, **others)


def from_cloud(answer: Answer) -> bool:
    return answer.headers[SERVED_BY] == "fallback"


def test_unknown_model_is_answered_by_the_fallback(engine: type[fakes.Engine], cloud: Cloud) -> None:
    with serving(settings(cloud, fallback_key="secret")) as live:
        assert not from_cloud(live.chat(max_tokens=1))
        assert cloud.received == []
        found = live.chat(model="gpt-9", unknown_here={"a": [1]}, allow_fallback=True)
        assert (found.status, found.json, from_cloud(found)) == (200, {"id": "from-the-cloud"}, True)
        assert found.headers["X-Request-Id"]
        assert found.headers["Set-Cookie"] is None
        assert from_cloud(live.chat(model="gpt-9"))
        assert cloud.received.pop()[1].get("Cookie") is None, "the cookie may be another user's"
        ((path, headers, body),) = cloud.received
        assert path == "/v1/chat/completions"
        assert headers["Authorization"] == "Bearer secret"
        assert body == {"messages": [{"role": "user", "content": "Hi"}], "model": "gpt-9", "unknown_here": {"a": [1]}}
        assert 'ferrule:fallback_requests_total{reason="model"} 2.0' in live.request("/metrics").body.decode()


@pytest.mark.parametrize("path", ["/v1/completions", "/completions", "/v1/embeddings", "/v1/responses"])
def test_paths_of_openai_have_a_fallback(engine: type[fakes.Engine], cloud: Cloud, path: str) -> None:
    with serving(settings(cloud, fallback_model="theirs")) as live:
        name = "prompt" if path.endswith("completions") else "input"
        assert from_cloud(live.request(path, {name: "Hi", "model": "other"}))
        assert cloud.received[0][0] == f"/v1/{path.rpartition('/')[2]}"
        assert cloud.received[0][2] == {name: "Hi", "model": "theirs"}
        assert live.request("/tokenize", {"prompt": "Hi", "model": "other"}).status == 404
        assert live.request("/v1/messages", {"model": "other", "max_tokens": 1, "messages": []}).status >= 400
        assert len(cloud.received) == 1


def test_private_and_invalid_requests_stay_here(engine: type[fakes.Engine], cloud: Cloud) -> None:
    with serving(settings(cloud)) as live:
        private = live.chat(model="gpt-9", allow_fallback=False)
        assert (private.status, private.error["code"]) == (404, "model_not_found")
        assert live.chat(model="gpt-9", allow_fallback="no").error["param"] == "allow_fallback"
        assert live.chat(temperature=-1).status == 400
        assert live.request("/v1/chat/completions", b"{").status == 400
        for stored in ({"previous_response_id": "resp_1"}, {"background": True}):
            assert live.request("/v1/responses", {"input": "Hi", "model": "gpt-9", **stored}).status >= 400
        body = {"messages": [], "model": "gpt-9"}
        sent_on = live.request("/v1/chat/completions", body, headers={"X-Ferrule-Fallback": "1"})
        assert sent_on.status >= 400, "two servers would otherwise send a request to each other"
        assert cloud.received == []


def test_reasons_can_be_chosen(engine: type[fakes.Engine], cloud: Cloud) -> None:
    with serving(settings(cloud, fallback_when=("length",))) as live:
        assert live.chat(model="gpt-9").status == 404
        assert cloud.received == []
        for answer in (
            live.complete(LONG),
            live.complete([1] * 3000),
            live.complete(LONG, stream=True),
            live.chat(messages=[{"role": "user", "content": LONG}]),
        ):
            assert from_cloud(answer)
    with serving() as live:
        refused = live.complete(LONG)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


def test_full_queue_uses_the_fallback(engine: type[fakes.Engine], cloud: Cloud) -> None:
    engine.gate = threading.Event()
    with (
        serving(settings(cloud, max_concurrent_requests=1)) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            own = pool.submit(lambda: live.chat(max_tokens=2))
            until(live.llm._registry.all)
            assert from_cloud(live.chat(max_tokens=2))
            private = live.chat(max_tokens=2, allow_fallback=False)
            assert (private.status, private.error["code"]) == (503, "queue_full")
        finally:
            engine.gate.set()
        answer = own.result(60)
        assert (answer.status, from_cloud(answer)) == (200, False)


def test_unfinished_uploads_do_not_use_the_fallback(
    engine: type[fakes.Engine], cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_UPLOADS", 0)
    with serving(settings(cloud)) as live:
        refused = live.chat(max_tokens=2)
        assert (refused.status, refused.error["code"]) == (503, "too_many_uploads")
        assert cloud.received == []


def test_slow_upload_uses_the_fallback(engine: type[fakes.Engine], cloud: Cloud) -> None:
    engine.gate = threading.Event()
    with serving(settings(cloud, fallback_after=0.2)) as live, live.connect() as client:
        try:
            body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body[:9])
            time.sleep(0.5)  # longer than the time of the setting
            client.sendall(body[9:])
            received = b"".join(iter(lambda: client.recv(1 << 14), b""))
        finally:
            engine.gate.set()
        assert b"from-the-cloud" in received


@pytest.mark.parametrize("stream", [False, True])
def test_slow_first_token_uses_the_fallback(engine: type[fakes.Engine], cloud: Cloud, stream: bool) -> None:
    engine.gate = threading.Event()
    with serving(settings(cloud, fallback_after=0.5)) as live, ThreadPoolExecutor(1) as pool:
        try:
            assert from_cloud(live.chat(max_tokens=2, stream=stream))
            until(lambda: not live.llm._registry.all())
            private = pool.submit(lambda: live.chat(max_tokens=2, allow_fallback=False))
            until(live.llm._registry.all)
        finally:
            engine.gate.set()
        assert not from_cloud(private.result(60))
        assert len(cloud.received) == 1


def test_model_that_cannot_be_loaded_uses_the_fallback(engine: type[fakes.Engine], cloud: Cloud) -> None:
    def load() -> AsyncLLM:
        raise ModelFileError("the file is truncated")

    with serving(settings(cloud), on_demand={"m": OnDemand(load, "m")}) as live:
        assert from_cloud(live.chat())
        assert live.chat(allow_fallback=False).error["code"] == "model_load_failed"


def test_stream_and_error_pass_through(engine: type[fakes.Engine], cloud: Cloud) -> None:
    chunks = [b'data: {"choices": [{"delta": {"tool_calls": []}}]}\n\n', b"data: [DONE]\n\n"]
    cloud.pieces, cloud.kind = chunks, "text/event-stream"
    cloud.gate.clear()
    with serving(settings(cloud)) as live:
        with live.connect() as client:
            body = json.dumps({"model": "gpt-9", "stream": True, "messages": []}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            received = b""
            while b"tool_calls" not in received:  # before the second event exists
                piece = client.recv(1 << 14)
                assert piece
                received += piece
            cloud.gate.set()
            while b"[DONE]" not in received:
                received += client.recv(1 << 14)
        assert list(events(live.chat(model="gpt-9", stream=True).body)) == [json.loads(chunks[0][6:])]
        cloud.status, cloud.kind, cloud.pieces = 429, "application/json", [b'{"error": {"code": "rate_limit"}}']
        limited = live.chat(model="gpt-9")
        assert (limited.status, limited.error["code"], from_cloud(limited)) == (429, "rate_limit", True)
        assert limited.headers["Retry-After"] == "7"


def test_disconnect_closes_the_stream_of_the_fallback(engine: type[fakes.Engine], cloud: Cloud) -> None:
    cloud.pieces, cloud.kind = [b"data: {}\n\n"] + [b"data: {}\n\n" * 10_000] * 2000, "text/event-stream"
    with serving(settings(cloud)) as live:
        with live.connect() as client:
            body = json.dumps({"model": "gpt-9", "stream": True, "messages": []}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            assert client.recv(1 << 10)
        assert cloud.closed.wait(60)


def test_shutdown_waits_for_the_stream_of_the_fallback(engine: type[fakes.Engine], cloud: Cloud) -> None:
    cloud.pieces, cloud.kind = [b"data: {}\n\n", b"data: [DONE]\n\n"], "text/event-stream"
    cloud.gate.clear()
    with serving(settings(cloud)) as live, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: live.chat(model="gpt-9", stream=True))
        until(lambda: cloud.received)
        live.end()
        until(lambda: live.server.models.draining)
        assert not live.server.should_exit
        cloud.gate.set()
        assert list(events(answer.result(60).body)) == [{}]
        live.thread.join(60)


def test_refusal_is_sent_if_the_fallback_is_unreachable(
    engine: type[fakes.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ferrule.server")
    with serving(ServerSettings(fallback_url="http://127.0.0.1:9/v1")) as live:
        found = live.chat(model="gpt-9")
        assert (found.status, found.error["code"]) == (404, "model_not_found")
        until(lambda: any(record.message == "request" for record in caplog.records))
        fields = next(vars(record)["fields"] for record in caplog.records if record.message == "request")
        assert (fields["error"], fields.get("fallback")) == ("model_not_found", None)
        assert "fallback failed" in caplog.text
        metrics = live.request("/metrics").body.decode()
        assert 'ferrule:fallback_failures_total{reason="model"} 1.0' in metrics
        assert "ferrule:fallback_requests_total{" not in metrics
        found = live.complete(LONG)
        assert (found.status, found.error["code"]) == (400, "context_length_exceeded")
        assert live.chat(max_tokens=1).status == 200


def test_unreachable_fallback_of_a_slow_request_is_a_502(engine: type[fakes.Engine]) -> None:
    engine.gate = threading.Event()
    with serving(ServerSettings(fallback_url="http://127.0.0.1:9/v1", fallback_after=0.2)) as live:
        try:
            found = live.chat(max_tokens=2)
        finally:
            engine.gate.set()
        assert (found.status, found.error["code"]) == (502, "fallback_unreachable")


def test_responses_stay_where_they_are_stored(engine: type[fakes.Engine], cloud: Cloud, tmp_path: Path) -> None:
    with serving(settings(cloud, responses_db=str(tmp_path / "responses.db"))) as live:
        assert live.request("/v1/responses", {"input": "Hi", "model": "gpt-9"}).status == 404
        assert cloud.received == []


def test_embeddings_of_a_known_model_stay_here(engine: type[fakes.Engine], cloud: Cloud) -> None:
    def load() -> AsyncLLM:
        raise ModelFileError("the file is truncated")

    with serving(settings(cloud), on_demand={"m": OnDemand(load, "m")}) as live:
        refused = live.request("/v1/embeddings", {"input": "Hi", "model": "m"})
        assert refused.error["code"] == "model_load_failed"
        assert cloud.received == []
        assert from_cloud(live.request("/v1/embeddings", {"input": "Hi", "model": "other"}))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"fallback_when": ["error"]}, "fallback_after must be unset where fallback_when does not have queue, got 5"),
        ({"keep_alive": 4}, "fallback_after must be at most keep_alive (4), after which a stream begins, got 5"),
    ],
)
def test_time_without_effect_is_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(message)):
        ServerSettings(fallback_url="https://example.org/v1", fallback_after=5, **others)
    assert ServerSettings(fallback_after=5, keep_alive=0).fallback_after == 5


def test_pages_of_other_origins_can_read_who_has_answered(engine: type[fakes.Engine], cloud: Cloud) -> None:
    origin = "https://example.org"
    with serving(settings(cloud, allowed_origins=[origin])) as live:
        body = {"messages": [], "model": "gpt-9"}
        found = live.request("/v1/chat/completions", body, headers={"Origin": origin})
        assert from_cloud(found)
        assert SERVED_BY in found.headers["Access-Control-Expose-Headers"]


def test_api_key_is_required_before_the_fallback(engine: type[fakes.Engine], cloud: Cloud) -> None:
    with serving(settings(cloud, api_keys=["secret"])) as live:
        assert live.chat(model="gpt-9").status == 401
        assert cloud.received == []
