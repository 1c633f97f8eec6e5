"""Disconnecting and stalled clients, failing engines, timeouts and shutdown of the server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fakes
from event_loop import SLACK
from ferrule import AsyncLLM
from ferrule.server import ServerSettings, streaming
from ferrule.server.middleware import http_protocol
from ferrule.server.serving import Server
from server.live import Answer, Live, serving, until

LONG = {"max_tokens": 2000, "ignore_eos": True}
PROGRAM = """
import sys, fakes
fakes.install()
fakes.Engine.step_seconds = 0.01
from ferrule._cli import main
sys.exit(main())
"""


def ask(live: Live, **fields: object) -> socket.socket:
    """Sends a request without reading the response."""
    client = live.connect()
    send(client, **{**LONG, **fields})
    return client


def send(client: socket.socket, **fields: object) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)


def fake_of(live: Live) -> fakes.Engine:
    found = live.llm._driver._engine
    assert isinstance(found, fakes.Engine)
    return found


def all_free(live: Live) -> bool:
    return not fake_of(live).running and not live.llm._registry.all() and not live.llm._registry._sequences


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_disconnect_aborts_running_request(engine: type[fakes.Engine], live: Live, n: int, stream: bool) -> None:
    engine.step_seconds = 0.005
    with ask(live, stream=stream, n=n) as client:
        until(lambda: fake_of(live).running)
        if stream:
            client.recv(100)
    until(lambda: all_free(live))
    assert live.chat(max_tokens=1).status == 200


def test_disconnect_aborts_queued_request(engine: type[fakes.Engine]) -> None:
    engine.gate = threading.Event()
    with serving(llm=lambda: AsyncLLM(max_num_seqs=1)) as live:
        try:
            with ask(live, stream=True):
                until(live.llm._registry.all)
            until(lambda: not live.llm._registry.all())
        finally:
            engine.gate.set()
        until(lambda: all_free(live))


def test_disconnect_aborts_request_in_prefill(engine: type[fakes.Engine]) -> None:
    engine.prefill_chunk, engine.step_seconds = 8, 0.01
    with serving() as live:
        with ask(live, messages=[{"role": "user", "content": "word " * 1000}]):
            until(lambda: any(sequence.computed for sequence in fake_of(live).running.values()))
        until(lambda: all_free(live))


def full(live: Live, **fields: object) -> socket.socket:
    """Returns a client that reads nothing while the server has a response for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", live.port))
    until(lambda: len(live.server.server_state.connections) == 1)
    (connection,) = live.server.server_state.connections
    assert isinstance(connection, http_protocol.LimitedH11Protocol)
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    send(client, **LONG, stream=True, logprobs=True, top_logprobs=20, **fields)
    until(lambda: connection.flow.write_paused)
    return client


def test_unread_events_are_not_buffered(engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_TIMEOUT", 600.0)
    with serving(ServerSettings(max_concurrent_requests=1, request_timeout=600)) as live, full(live):
        # At most one event is pending.
        (connection,) = live.server.server_state.connections
        assert isinstance(connection, http_protocol.LimitedH11Protocol)
        waiting, fake = connection.transport.get_write_buffer_size(), fake_of(live)
        steps = fake.steps
        until(lambda: fake.steps > steps + 20 or not fake.running)
        assert live.chat(max_tokens=3).error["code"] == "queue_full"
        assert connection.transport.get_write_buffer_size() <= waiting


def test_stalled_client_is_disconnected_and_frees_its_slot(
    engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_TIMEOUT", 1.0)
    with serving(ServerSettings(max_concurrent_requests=1, request_timeout=600)) as live, full(live):
        until(lambda: live.chat(max_tokens=3).status == 200)
        until(lambda: all_free(live))


def test_slow_client_receives_complete_stream(engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_TIMEOUT", 4.0)
    with serving() as live, full(live) as client:
        received, begun = b"", time.monotonic()
        while b"0\r\n\r\n" not in received[-10:]:
            piece = client.recv(1 << 14)
            assert piece
            received += piece
            if time.monotonic() - begun < 5:
                time.sleep(0.05)
        assert b"[DONE]" in received


def test_request_timeout_applies_to_stalled_client(engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "ERROR_GRACE", 0.2)
    monkeypatch.setattr(http_protocol, "STALL_TIMEOUT", 600.0)
    engine.step_seconds = 0.001
    with serving(ServerSettings(max_concurrent_requests=1, request_timeout=3)) as live, full(live):
        until(lambda: live.chat(max_tokens=3).status == 200)
        until(lambda: all_free(live))


def test_non_finite_logits_fail_only_their_request(live: Live) -> None:
    good = live.chat(max_tokens=5, seed=1).json["choices"]
    fake_of(live).bad_prompt = live.llm.tokenize("Bad")
    for stream in (False, True):
        found = live.complete("Bad", max_tokens=5, stream=stream)
        assert (found.status, found.error["code"]) == (422, "request_failed")
        assert "Retry-After" not in found.headers
        assert "not finite" in found.error["message"]
    assert live.request("/health").status == 200
    assert live.chat(max_tokens=5, seed=1).json["choices"] == good


def test_worker_panic_makes_server_unhealthy(engine: type[fakes.Engine], live: Live) -> None:
    engine.step_seconds = 0.01
    with ask(live, stream=True) as client:
        received = client.recv(1 << 16)
        fake_of(live).dies_at = fake_of(live).steps + 5
        begun = time.monotonic()
        until(lambda: live.request("/health").status == 503)
        assert time.monotonic() - begun < 2 * SLACK
        while piece := client.recv(1 << 16):
            received += piece
            if b"[DONE]" in received or b"0\r\n\r\n" in received:
                break
    assert b'"code": "engine_unavailable"' in received
    found = live.chat(max_tokens=1)
    assert (found.status, found.error["code"]) == (503, "engine_unavailable")
    assert live.request("/health").error["code"] == "engine_unavailable"


def test_request_timeout(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.05
    with serving(ServerSettings(request_timeout=3)) as live:
        found = live.chat(**LONG)
        assert (found.status, found.error["code"]) == (503, "deadline_exceeded")
        found = live.chat(**LONG, stream=True)
        assert found.status == 200
        *_, last = found.body.strip().split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        assert b'"content"' in found.body
        until(lambda: all_free(live))


def test_request_timeout_of_header(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.05
    with serving(ServerSettings(request_timeout=600)) as live:
        body = {"prompt": "Hi", **LONG}
        found = live.request("/v1/completions", body, headers={"X-Request-Timeout": "0.05"})
        assert found.error["code"] == "deadline_exceeded"
        assert live.chat(max_tokens=1).status == 200
        for wrong in ("soon", "0", "-1", "nan", "inf"):
            found = live.request("/v1/completions", body, headers={"X-Request-Timeout": wrong})
            assert (found.status, found.error["param"]) == (400, "X-Request-Timeout")


@contextmanager
def program(*arguments: str, text: str = PROGRAM) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`ferrule serve` on a fake engine, and its URL."""
    command = [sys.executable, "-c", text, "serve", "--port", "0", *arguments]
    tests = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=tests, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = json.loads(process.stderr.readline())
            assert line["event"] == "listening"
            yield process, line["url"]
        finally:
            process.kill()


def test_connections_over_limit_replace_idle_ones(engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "max_connections", lambda: 4)
    engine.step_seconds = 0.01
    with serving() as live, ask(live, stream=True, max_tokens=100) as busy:
        received = busy.recv(100)
        idle = [live.connect() for _ in range(20)]
        assert live.request("/version").status == 200
        assert len(live.server.server_state.connections) <= 4
        while b"[DONE]" not in received:
            piece = busy.recv(1 << 16)
            assert piece
            received += piece
        for client in idle:
            client.close()


def test_file_descriptor_exhaustion_is_survived_without_log_flood() -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 160))\n"
    with program(text=few + PROGRAM) as (process, url):
        live = live_at(url)
        until(lambda: live.request("/health").status == 200)
        idle = [live.connect() for _ in range(400)]
        assert live.request("/version").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        received = process.stderr.read()
        assert "OSError" not in received
        assert all(json.loads(line) for line in received.splitlines())
        assert len(received) < 10_000
        for client in idle:
            client.close()


def live_at(url: str) -> Live:
    """Returns a request to a server in another process."""
    return Live(None, int(url.rpartition(":")[2]), None, threading.current_thread())  # type: ignore[arg-type]


def streams(live: Live, count: int) -> list[socket.socket]:
    """Returns requests whose responses have started."""
    until(lambda: live.request("/health").status == 200)
    found = [ask(live, stream=True) for _ in range(count)]
    for client in found:
        client.recv(10)
    return found


def rest(client: socket.socket) -> bytes:
    received = b""
    with client:
        while piece := client.recv(1 << 16):
            received += piece
    return received


def test_sigterm_aborts_running_requests_after_drain_timeout() -> None:
    with program("--drain-timeout", "1") as (process, url):
        clients = streams(live_at(url), 8)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            assert b'"code": "draining"' in rest(client)
        assert process.wait(60) == 0


def test_sigterm_lets_running_request_finish_within_drain_timeout() -> None:
    with program("--drain-timeout", "30") as (process, url):
        live = live_at(url)
        until(lambda: live.request("/health").status == 200)
        expected = live.chat(max_tokens=400, seed=1).json["choices"]
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(live.chat(max_tokens=400, seed=1)))
        thread.start()
        until(lambda: re.search(rb"num_requests_running\{[^}]*\} 1", live.request("/metrics").body))
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert answers[0].json["choices"] == expected
        assert process.wait(60) == 0


def test_sigterm_rejects_new_requests_and_the_second_one_skips_draining() -> None:
    with program("--drain-timeout", "600") as (process, url):
        live = live_at(url)
        clients = streams(live, 2)
        drain(process, live)
        found = live.chat(max_tokens=1)
        assert (found.status, found.error["code"]) == (503, "draining")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for client in clients:
            client.close()


def drain(process: subprocess.Popen[str], live: Live) -> None:
    """Sends SIGTERM and waits until it has been handled, since the system merges signals that are still pending."""
    process.send_signal(signal.SIGTERM)
    until(lambda: live.request("/health").status == 503)
    assert live.request("/health").error["code"] == "draining"


READING = (
    """
import pathlib, time
from ferrule._engine.lora import Adapters
def load(self, name, path):
    pathlib.Path(path, "begun").touch()
    time.sleep(600)
Adapters.load = load
"""
    + PROGRAM
)


@pytest.mark.parametrize(("signals", "drain_timeout"), [(1, "1"), (2, "600")])
def test_blocked_thread_does_not_prevent_shutdown(signals: int, drain_timeout: str, tmp_path: Path) -> None:
    """The shutdown waits for responses and threads up to the time limit."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with program("--drain-timeout", drain_timeout, "--lora-dir", str(tmp_path), text=READING) as (process, url):
        live = live_at(url)
        until(lambda: live.request("/health").status == 200)
        body = {"lora_name": "a", "lora_path": str(adapter)}
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(live.request("/v1/load_lora_adapter", body)))
        thread.start()
        until((adapter / "begun").exists)
        if signals == 2:
            drain(process, live)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        thread.join(60)
        assert (answers[0].status, answers[0].error["code"]) == (503, "draining")
        assert process.stderr is not None
        assert "Exception" not in process.stderr.read()


LOADING = (
    """
import time
from ferrule import AsyncLLM
AsyncLLM.__init__ = lambda *_, **__: time.sleep(600)
"""
    + PROGRAM
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_server_during_model_load(number: int) -> None:
    with program(text=LOADING) as (process, url):
        live = live_at(url)
        until(lambda: live.request("/health").error["code"] == "loading")
        process.send_signal(number)
        assert process.wait(60) == 0


def test_server_that_drains_while_models_load_is_never_ready(engine: type[fakes.Engine]) -> None:
    ready: list[bool] = []
    llm = AsyncLLM()
    try:
        server = Server(lambda: {"m": llm}, ServerSettings(), "127.0.0.1", on_ready=lambda: ready.append(True))
        server.models.draining = True
        asyncio.run(server._load_models())
        assert server.models.ready
        assert not ready
    finally:
        llm.close()


AMID_IMPORTS = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "ferrule.server":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass  # as in a destructor

sys.meta_path.insert(0, Finder())
from ferrule._cli import main
sys.exit(main())
"""


def test_interrupt_during_imports_exits_with_130() -> None:
    command = [sys.executable, "-c", AMID_IMPORTS, "serve", "--port", "0"]
    found = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert (found.returncode, found.stderr.strip()) == (130, "")


@pytest.mark.parametrize(("arguments", "status"), [((), 200), (("--ollama",), 200), (("--no-ollama",), 404)])
def test_ollama_api_is_served_unless_disabled(arguments: tuple[str, ...], status: int) -> None:
    with program(*arguments) as (_, url):
        assert live_at(url).request("/api/version").status == status


def test_exit_with_parent_ends_server() -> None:
    parent = f"""
import subprocess, sys, time
with subprocess.Popen({[sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--exit-with-parent"]!r}) as child:
    print(child.pid, flush=True)
    time.sleep(600)
"""
    tests = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", parent], cwd=tests, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        child = int(process.stdout.readline())
        assert json.loads(process.stderr.readline())["event"] == "listening"
        process.kill()
        # The server logs it to the former stderr of the parent and exits.
        assert '"draining"' in process.stderr.read()
    until(lambda: not _runs(child))


def test_exit_with_parent_when_parent_ends_during_startup() -> None:
    """The parent ends while the server is imported."""
    waiting = """
import os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "ferrule.server":
            print("waiting", file=sys.stderr, flush=True)
            while os.getppid() == started:
                time.sleep(0.01)
started = os.getppid()
sys.meta_path.insert(0, Finder())
"""
    text = waiting + "from ferrule._cli import main; sys.exit(main())"
    parent = f"""
import subprocess, sys
child = subprocess.Popen({[sys.executable, "-c", text, "serve", "--port", "0", "--exit-with-parent"]!r})
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting\n"
        process.stdin.close()
        # It ends where the child has ended too.
        assert '"draining"' in process.stderr.read()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # the process that adopted it may not have reaped it yet
