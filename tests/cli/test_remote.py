"""`ferrule chat --url`: servers with OpenAI's API, and servers without it."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import click
import pytest

from cli.terminal import Terminal
from ferrule._cli import main
from ferrule._cli.chat.remote import RemoteAnswers
from ferrule._params.sampling import SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import InvalidParameterError, RemoteError

MODELS = {"data": [{"id": "first", "max_model_len": 512}, {"id": "second"}]}
HI = [{"role": "user", "content": "Hi"}]


def chunk(**delta: Any) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


ENDING = [
    "data: " + json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
    "data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
    "data: [DONE]",
]
ANSWER = [": a comment", chunk(role="assistant", content=""), chunk(reasoning_content="Hm."), chunk(content="Hello")]


class Served:
    """Responses of a test server, and the requests it received."""

    def __init__(self) -> None:
        self.models: object = MODELS
        self.status = 200
        self.error: bytes = b"{}"
        self.lines = [*ANSWER, chunk(content=" there"), *ENDING]
        self.hangs = threading.Event()
        self.hung = False
        """Whether a client left while it hung."""
        self.requests: list[tuple[str, str | None, Any]] = []
        self.url = ""
        self.location: str | None = None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "*")
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
            """Keeps the test's output clean."""

        def do_GET(self) -> None:
            self._note(None)
            self._send(state.status if state.status != 200 and state.models is None else 200, state.models)

        def do_POST(self) -> None:
            self._note(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if state.status != 200:
                self.send_response(state.status)
                if state.location is not None:
                    self.send_header("Location", state.location)
                self.end_headers()
                self.wfile.write(state.error)
                return
            self.send_response(200)
            self.end_headers()
            for line in state.lines:
                self.wfile.write(f"{line}\n\n".encode())
                if line == "hang":
                    self._hang()

        def _hang(self) -> None:
            while not state.hangs.wait(0.02):
                try:
                    self.wfile.write(b": waiting\n\n")
                except OSError:
                    state.hung = True
                    return

        def _note(self, body: object) -> None:
            state.requests.append((self.path, self.headers["Authorization"], body))

        def _send(self, status: int, answer: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state
    state.hangs.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_answer_is_streamed(served: Served) -> None:
    answers = RemoteAnswers(served.url, None, "secret")
    assert (answers.name, answers.context) == ("first", 512)
    params = SamplingParams.with_model_defaults(
        temperature=0.5, top_k=3, logit_bias={5: 1}, structured_outputs=StructuredOutputsParams(regex="a+")
    )
    deltas = list(answers.stream(HI, params))
    assert "".join(delta.content for delta in deltas) == "Hello there"
    assert "".join(delta.reasoning for delta in deltas) == "Hm."
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens) == (7, 3)
    assert usage.summary.endswith("stop]")
    (first, key, _), (second, _, body) = served.requests
    assert (first, key, second) == ("/v1/models", "Bearer secret", "/v1/chat/completions")
    assert body == {
        "model": "first",
        "messages": HI,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_k": 3,
        "logit_bias": {"5": 1.0},
        "structured_outputs": {"regex": "a+"},
    }


def test_chat_command_with_url(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/stats\n"))
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    monkeypatch.setenv("FERRULE_API_KEY", "mine")
    assert main(["chat", "second", "--url", f"{served.url}/v1/", "--system", "Be kind."]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there\n"
    assert "second: 1 answers" in captured.err
    assert "prompts 7 tokens, answers 3 tokens" in captured.err
    path, key, body = served.requests[1]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer mine", "second")
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("reason", "usage", "max_tokens", "limit"),
    [
        ("length", {"prompt_tokens": 7, "completion_tokens": 300}, None, "the server's limit of 300 tokens;"),
        ("length", None, None, "the server's limit;"),
        ("length", {"prompt_tokens": 7, "completion_tokens": 300}, 300, ""),
        ("length", {"prompt_tokens": 212, "completion_tokens": 300}, None, ""),  # the context length
        ("stop", {"prompt_tokens": 7, "completion_tokens": 300}, None, ""),
    ],
)
def test_limit_of_server_is_reported(
    served: Served, reason: str, usage: dict[str, int] | None, max_tokens: int | None, limit: str
) -> None:
    served.lines = [
        *ANSWER,
        "data: " + json.dumps({"choices": [{"delta": {}, "finish_reason": reason}]}),
        "data: " + json.dumps({"choices": [], "usage": usage}),
        "data: [DONE]",
    ]
    params = SamplingParams.with_model_defaults(max_tokens=max_tokens)
    notices = [delta.notice for delta in RemoteAnswers(served.url, None, None).stream(HI, params) if delta.notice]
    advice = "--max-tokens (in a chat, /params max_tokens) sets another"
    assert notices == ([f"stopped at {limit} {advice}"] if limit else [])


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/v1", "http://", "http://x:99999", "http://x/?a=1"])
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(InvalidParameterError, match="url must be an HTTP URL such as http"):
        RemoteAnswers(url, "x", None)


def test_api_key_invalid_in_header_is_rejected(served: Served) -> None:
    with pytest.raises(click.UsageError, match="--api-key must be printable ASCII"):
        RemoteAnswers(served.url, None, "a\nb")
    assert not served.requests


def test_connection_refused_is_reported() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(RemoteError, match=f"{url}/models: cannot be reached: .*refused"):
        RemoteAnswers(url, None, None)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (b"<html>", "response is not a JSON object: b'<html>'"),
        ([], "response is not a JSON object"),
        ({}, "no models"),
        ({"data": []}, "no models"),
    ],
)
def test_invalid_model_list_is_reported(served: Served, models: object, message: str) -> None:
    served.models = models
    with pytest.raises(RemoteError, match=message):
        RemoteAnswers(served.url, None, None)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, b'{"error": {"message": "wrong key"}}', "401 Unauthorized: wrong key"),
        (404, b'{"error": "no such model"}', "404 Not Found: no such model"),
        (422, b'{"detail": [{"msg": "x"}]}', "422 .*msg"),
        (503, b"<html>", "503 Service Unavailable: no error message"),
        (500, b"", "500 .*: no error message"),
    ],
)
def test_http_error_is_reported_with_server_message(served: Served, status: int, error: bytes, message: str) -> None:
    answers = RemoteAnswers(served.url, None, None)
    served.status, served.error = status, error
    with pytest.raises(RemoteError, match=f"/v1/chat/completions: {message}"):
        list(answers.stream(HI, SamplingParams()))


def test_redirects_are_not_followed(served: Served) -> None:
    answers = RemoteAnswers(served.url, None, "secret")
    served.status, served.location = 307, f"{served.url}/elsewhere"
    with pytest.raises(RemoteError, match="307"):
        list(answers.stream(HI, SamplingParams()))
    assert [path for path, _, _ in served.requests] == ["/v1/models", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (ANSWER, r"the response ended before \[DONE\]$"),
        ([*ANSWER, "data: {"], "response is not a JSON object"),
        ([*ANSWER, "data: " + "[" * 100_000], "response is not a JSON object"),
        ([*ANSWER, 'data: {"error": {"message": "the engine died"}}'], "the engine died"),
        (["data: " + "x" * (17 << 20)], "an event has more than 16777216 bytes"),
    ],
)
def test_malformed_stream_is_reported(served: Served, lines: list[str], message: str) -> None:
    answers = RemoteAnswers(served.url, None, None)
    served.lines = lines
    with pytest.raises(RemoteError, match=message):
        list(answers.stream(HI, SamplingParams()))


@pytest.mark.parametrize(
    "event",
    [
        '{"choices": null}',
        '{"choices": [3, null, {"delta": 3}, {}]}',
        '{"choices": {}}',
        '{"usage": 3}',
        '{"choices": [{"delta": {"content": null}}]}',
    ],
)
def test_events_without_content_are_ignored(served: Served, event: str) -> None:
    answers = RemoteAnswers(served.url, None, None)
    served.lines = [f"data: {event}", *ENDING]
    assert "".join(delta.content for delta in answers.stream(HI, SamplingParams())) == ""


def test_failed_answer_is_not_added_to_conversation(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served.lines = ANSWER
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/stats\n"))
    assert main(["chat", "--url", served.url]) == 1
    err = capsys.readouterr().err
    assert f"error: {served.url}/v1/chat/completions: the response ended before [DONE]" in err
    assert "0 answers, 0 messages" in err


def test_ctrl_c_closes_connection(served: Served) -> None:
    served.lines = [*ANSWER, "hang"]
    with Terminal([sys.executable, "-m", "ferrule", "chat", "--url", served.url], {"no_proxy": "*"}) as terminal:
        terminal.read_until("> ")
        terminal.send("Hi\n")
        terminal.read_until("Hello")
        terminal.interrupt()
        terminal.read_until("> ")
        terminal.send("\x04")
        assert terminal.end() == 0
    deadline = time.monotonic() + 180
    while not served.hung and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.hung
