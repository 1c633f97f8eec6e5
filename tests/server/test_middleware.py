"""Requests that are rejected before a route runs: size, speed, API keys, hosts, origins and the queue."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import select
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

import fakes
from event_loop import SLACK
from ferrule import AsyncLLM
from ferrule.server import ServerSettings
from ferrule.server.middleware import admission, bodies, http_protocol
from server.live import Answer, Live, serving, until

JSON = "Content-Type: application/json"
KEYS = ("first-key", "sécond-key")
CHAT = b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}'


def raw(live: Live, head: str, *body: bytes) -> bytes:
    """Sends bytes and returns the response until the server closes; stops sending when the server stops reading."""
    with live.connect() as client:
        received = b""
        client.sendall(head.encode())
        try:
            for piece in body:
                client.sendall(piece)
        except OSError:
            pass
        try:
            while piece := client.recv(1 << 16):
                received += piece
        except ConnectionResetError:
            pass
        return received


def head(path: str = "/v1/chat/completions", *headers: str, method: str = "POST") -> str:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""))


def answer_of(response: bytes) -> Answer:
    top, _, body = response.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body)


@contextmanager
def held(engine: type[fakes.Engine]) -> Generator[threading.Event]:
    """Holds running requests until the context ends."""
    engine.gate = threading.Event()
    try:
        yield engine.gate
    finally:
        engine.gate.set()
        engine.gate = None


def test_oversized_content_length_returns_413_without_reading_body(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(max_body_bytes=1000)) as live:
        found = answer_of(raw(live, head("/v1/chat/completions", f"Content-Length: {1 << 30}")))
        assert (found.status, found.error["code"]) == (413, "body_too_large")
        assert "request body must have at most 1000 bytes (max_body_bytes), got 1073741824" in found.error["message"]
        assert live.request("/v1/chat/completions", CHAT).status == 200


def test_chunked_body_over_limit_returns_413(engine: type[fakes.Engine]) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1 << 14):  # a gigabyte
            sent += 1 << 16
            yield b"10000\r\n" + b" " * (1 << 16) + b"\r\n"

    with serving(ServerSettings(max_body_bytes=1 << 20)) as live:
        with live.connect() as client:
            client.sendall(head("/v1/chat/completions", "Transfer-Encoding: chunked", JSON).encode())
            received = b""
            for chunk in chunks():
                client.sendall(chunk)
                if select.select([client], [], [], 0.02)[0]:
                    received = client.recv(1 << 16)
                    break
        assert answer_of(received).status == 413
        assert sent < 16 << 20
        assert live.request("/v1/chat/completions", CHAT).status == 200


def test_slow_body_returns_408(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(body_timeout=0.3)) as live, live.connect() as client:
        client.sendall(head("/v1/chat/completions", "Content-Length: 1000", "Content-Type: application/json").encode())
        for _ in range(900):  # fewer bytes than announced
            client.sendall(b" ")
            if select.select([client], [], [], 0.1)[0]:
                break
        assert answer_of(client.recv(1 << 16)).status == 408


def receive(bodies_at_once: int, settings: ServerSettings) -> tuple[float, list[int]]:
    """Passes two bodies of 1 MiB through the middleware, both at once or one after the other.

    Both requests end when both bodies have arrived. Returns the seconds until then and the bytes that arrived.
    """

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message["body"])
            more = message["more_body"]
        arrived.append(size)
        places.release()
        await ended.wait()

    async def one() -> None:
        async def receive() -> Message:
            await asyncio.sleep(0)
            pieces.pop()
            return {"type": "http.request", "body": bytes(1 << 16), "more_body": bool(pieces)}

        pieces = [None] * 16
        scope: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await layer(scope, receive, nothing)

    async def nothing(message: Message) -> None:
        raise AssertionError(message)

    async def run() -> float:
        begun = time.monotonic()
        async with asyncio.TaskGroup() as requests:
            for _ in range(2):
                await places.acquire()
                requests.create_task(one())
            for _ in range(bodies_at_once):
                await places.acquire()
            ended.set()
        return time.monotonic() - begun

    arrived: list[int] = []
    ended, places = asyncio.Event(), asyncio.Semaphore(bodies_at_once)
    server: Any = SimpleNamespace(settings=settings)
    layer = bodies.Bodies(read_all, server=server)
    return asyncio.run(run()), arrived


def test_large_bodies_that_arrive_together_share_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the rate is not counted as time that the client took."""
    monkeypatch.setattr(bodies, "LARGE_BODIES_RATE", 2 << 20)
    seconds, arrived = receive(2, ServerSettings(body_timeout=0.6))
    assert arrived == [1 << 20, 1 << 20]
    assert seconds > 0.8  # 2 MiB, of which the first piece and the last do not wait


def test_a_large_body_that_arrives_alone_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the rate, nor for an earlier body whose request is still answered."""
    monkeypatch.setattr(bodies, "LARGE_BODIES_RATE", 1)
    assert receive(1, ServerSettings())[1] == [1 << 20, 1 << 20]


def test_slow_headers_return_408(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT", 0.3)
    found = answer_of(raw(live, "POST / HTTP/1.1\r\nHost: loc"))
    assert (found.status, found.error["code"]) == (408, "header_timeout")
    assert raw(live, "") == b""


def test_oversized_headers_return_431(live: Live) -> None:
    found = answer_of(raw(live, head("/v1/models", "X-Large: " + "a" * (1 << 16)), b"a" * 1000))
    assert (found.status, found.error["code"]) == (431, "headers_too_large")
    found = answer_of(raw(live, "GET / HTTP/1.1\r\nX: ", *([b"a" * (1 << 16)] * 160)))
    assert (found.status, found.error["code"]) == (431, "headers_too_large")
    assert live.request("/health").status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/m%65ssages/count_tokens?beta=true"])
def test_header_errors_have_anthropic_format(live: Live, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT", 0.3)
    for found, status in slow_and_large(live, path):
        assert found.status == status
        assert (found.json["type"], found.error["type"]) == ("error", "invalid_request_error")


def test_header_errors_have_ollama_format(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT", 0.3)
    for found, status in slow_and_large(live, "/api/chat"):
        assert found.status == status
        assert found.json.keys() == {"error"}
        assert "header" in found.json["error"]


def slow_and_large(live: Live, path: str) -> Iterator[tuple[Answer, int]]:
    """Responses to endless and to oversized headers."""
    yield answer_of(raw(live, f"POST {path} HTTP/1.1\r\nHost: loc")), 408
    yield answer_of(raw(live, f"POST {path} HTTP/1.1\r\nX: ", *([b"a" * (1 << 16)] * 160))), 431


def test_malformed_http_returns_400(live: Live) -> None:
    found = answer_of(raw(live, "{:\r\n\r\n"))
    assert (found.status, found.error["code"]) == (400, "invalid_http")
    assert raw(live, head("/v1/chat/completions", "Transfer-Encoding: chunked"), b"no number\r\n") == b""
    assert live.request("/health").status == 200


def test_health_supports_head_requests(live: Live) -> None:
    found = live.request("/health", method="HEAD")
    assert (found.status, found.body) == (200, b"")


def paths(live: Live) -> list[tuple[str, str]]:
    """Returns every path with each of its methods, and some unknown paths."""
    app: Any = live.server.config.app
    described = app.openapi()["paths"]
    known = [(path.replace("{model}", "tiny"), method.upper()) for path in described for method in described[path]]
    return [
        *known,
        ("/", "GET"),
        ("/openapi.json", "GET"),
        ("/nothing", "POST"),
        ("/health/x", "GET"),
        ("//health", "GET"),
    ]


def test_missing_or_wrong_key_returns_401_on_every_path(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(api_keys=KEYS)) as live:
        assert live.request("/health").status == live.request("/v1/health").status == 200
        for path, method in paths(live):
            if path == "/health":
                continue
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"X-Api-Key": "first-key2"},
                {"Authorization": "Bearer"},
            ):
                body = None if method == "GET" else b"{}"
                found = live.request(path, body, method=method, headers=headers)
                # Each API has its own error format; all have a message.
                assert (found.status, found.error["message"][:10]) == (401, "invalid or"), (path, method, headers)


def test_every_api_key_works_in_every_header(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(api_keys=KEYS)) as live:
        for key in KEYS:
            basic = base64.b64encode(f"anyone:{key}".encode()).decode()
            latin = key.encode().decode("latin-1")
            for headers in (
                {"Authorization": f"Bearer {latin}"},
                {"X-Api-Key": latin},
                {"Authorization": f"Basic {basic}"},
            ):
                assert live.request("/v1/models", headers=headers).status == 200, headers
        assert live.request("/v1/models", headers={"Authorization": "Basic !"}).status == 401


def test_host_header_is_checked(engine: type[fakes.Engine]) -> None:
    def status(live: Live, host: str) -> int:
        return live.request("/version", headers={"Host": host}).status

    with serving() as live:
        for host in ("localhost", "localhost:80", "127.0.0.1", "[::1]:8000", "10.1.2.3:1"):
            assert status(live, host) == 200, host
        for host in ("example.org", "localhost.example.org", "127.0.0.1.example.org", "example.org:80", "[", "a b"):
            assert status(live, host) == 403, host
        assert answer_of(raw(live, "GET /version HTTP/1.0\r\n\r\n")).status == 403
    with serving(ServerSettings(allowed_hosts=["example.org"])) as live:
        assert status(live, "Example.org:81") == 200
        assert status(live, "other.example.org") == 403
    with serving(ServerSettings(allowed_hosts=["*"])) as live:
        assert status(live, "anything") == 200


def test_origin_header_is_checked(engine: type[fakes.Engine]) -> None:
    page = "https://example.org"
    with serving() as live:
        assert live.request("/version", headers={"Origin": live.url}).status == 200
        for origin in (page, "null", "http://localhost", "http://127.0.0.1:1", "http://["):
            found = live.request("/v1/chat/completions", CHAT, headers={"Origin": origin})
            assert (found.status, found.error["code"]) == (403, "origin_not_allowed"), origin
            assert "Access-Control-Allow-Origin" not in found.headers
    with serving(ServerSettings(allowed_origins=[page], api_keys=KEYS)) as live:
        preflight = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-api-key",
        }
        found = live.request("/v1/chat/completions", method="OPTIONS", headers=preflight)
        assert found.status == 200
        assert found.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
        assert found.headers["Access-Control-Allow-Origin"] == page
        assert found.headers["Access-Control-Allow-Headers"] == "x-api-key"
        found = live.request("/v1/chat/completions", CHAT, headers={"Origin": page, "X-Api-Key": KEYS[0]})
        assert (found.status, found.headers["Access-Control-Allow-Origin"]) == (200, page)
        found = live.request("/v1/chat/completions", CHAT, headers={"Origin": page})
        assert (found.status, found.headers["Access-Control-Allow-Origin"]) == (401, page)
        assert live.request("/version", headers={"Origin": "https://example.com", "X-Api-Key": KEYS[0]}).status == 403


def test_localhost_allows_the_origins_of_this_machine(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(allowed_origins=["localhost"])) as live:
        for origin in ("http://localhost", "https://localhost:8080", "http://127.0.0.1:3000", "http://[::1]:3000"):
            found = live.request("/version", headers={"Origin": origin})
            assert (found.status, found.headers["Access-Control-Allow-Origin"]) == (200, origin)
        for origin in (
            "http://example.org",
            "http://notlocalhost",
            "http://localhost.evil.com",
            "http://10.0.0.1",
            "x",
        ):
            assert live.request("/version", headers={"Origin": origin}).status == 403, origin


def test_full_queue_returns_503(engine: type[fakes.Engine]) -> None:
    def llm() -> AsyncLLM:
        return AsyncLLM(max_num_seqs=1, max_queued_requests=1)

    with serving(llm=llm) as live:
        answers: list[Answer] = []
        with held(engine):
            threads = [threading.Thread(target=lambda: answers.append(live.chat(max_tokens=2))) for _ in range(2)]
            for thread in threads:
                thread.start()
            until(lambda: len(live.llm._registry.all()) == 2)
            fastest = math.inf  # the others may have waited for a processor
            for _ in range(20):
                begun = time.perf_counter()
                found = live.chat(max_tokens=2)
                fastest = min(fastest, time.perf_counter() - begun)
                assert (found.status, found.error["code"]) == (503, "queue_full")
                assert found.headers["Retry-After"] == "1"
            assert fastest < 0.05 * SLACK
            assert live.request("/health").status == 200
        for thread in threads:
            thread.join(60)
        assert [answer.status for answer in answers] == [200, 200]
        assert live.chat(max_tokens=2).status == 200


def test_unfinished_uploads_do_not_occupy_request_slots(
    engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_UPLOADS", 3)
    with serving(ServerSettings(max_concurrent_requests=1)) as live:
        unfinished = head("/v1/chat/completions", f"Content-Length: {len(CHAT)}", JSON).encode()
        clients = [live.connect() for _ in range(2)]
        for client in clients:
            client.sendall(unfinished + CHAT[:5])
        for _ in range(2):
            assert live.request("/v1/chat/completions", CHAT).status == 200
        clients.append(live.connect())
        clients[-1].sendall(unfinished + CHAT[:5])
        until(lambda: live.request("/v1/chat/completions", CHAT).status == 503)
        found = live.request("/v1/chat/completions", CHAT)
        assert (found.status, found.error["code"]) == (503, "too_many_uploads")
        assert "3 request bodies are being received" in found.error["message"]
        # A complete body is rejected if the limit is reached.
        with held(engine):
            clients.pop(0).close()
            until(lambda: live.request("/tokenize", {"prompt": "a"}).status == 200)
            thread = threading.Thread(target=live.request, args=("/v1/chat/completions", CHAT))
            thread.start()
            until(live.llm._registry.all)
            clients[0].sendall(CHAT[5:])
            assert answer_of(b"".join(iter(lambda: clients[0].recv(1 << 16), b""))).error["code"] == "queue_full"
        thread.join(60)
        for client in clients:
            client.close()
        until(lambda: live.request("/v1/chat/completions", CHAT).status == 200)


def test_n_above_queue_capacity_is_rejected(engine: type[fakes.Engine]) -> None:
    with serving(llm=lambda: AsyncLLM(max_num_seqs=1, max_queued_requests=3)) as live:
        found = live.chat(n=5)
        assert (found.status, found.error["param"]) == (400, "n")
        with held(engine):
            thread = threading.Thread(target=live.chat, kwargs={"max_tokens": 2, "n": 3})
            thread.start()
            until(live.llm._registry.all)
            found = live.chat(n=2)
            assert (found.status, found.error["code"]) == (503, "queue_full")
        thread.join(60)


def test_requests_have_ids_and_log_lines(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ferrule.server")
    found = live.request("/v1/completions", {"prompt": "A secret", "max_tokens": 3}, headers={"X-Request-Id": "mine-1"})
    assert found.headers["X-Request-Id"] == "mine-1"
    bad = live.request(
        "/v1/completions", {"prompt": "A secret", "temperature": "A secret"}, headers={"X-Request-Id": "a b"}
    )
    assert bad.headers["X-Request-Id"] != "a b"
    # A line is written when its answer is whole, which the client may see before.
    until(lambda: sum(record.getMessage() == "request" for record in caplog.records) == 2)
    first, second = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
    assert (first["request_id"], first["status"], first["output_tokens"]) == ("mine-1", 200, 3)
    assert first["model"] == "tiny"
    assert (second["status"], second["error"]) == (400, "invalid_type")
    assert "secret" not in json.dumps([first, second])


def test_slow_stream_sends_keep_alive_comments(engine: type[fakes.Engine]) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 2, "stream": true}'
    with serving(ServerSettings(keep_alive=0.1)) as live, live.connect() as client:
        with held(engine):
            client.sendall(head("/v1/completions", f"Content-Length: {len(body)}", JSON).encode() + body)
            received = b""
            while b"\r\n: " not in received:  # before the first token exists
                piece = client.recv(1 << 16)
                assert piece
                received += piece
        received += b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert b'"finish_reason":"length"' in received
        assert b"[DONE]" in received
