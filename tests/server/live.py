"""A server that listens on loopback, in a thread of the test's process."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ferrule import AsyncLLM
from ferrule.server import OnDemand, ServerSettings
from ferrule.server.serving import Server, listen


@dataclass
class Answer:
    status: int
    headers: Any
    """Headers by case-insensitive name."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass
class Live:
    """A running server."""

    server: Server
    port: int
    llm: Any
    """The AsyncLLM, once it is loaded."""
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, path: str, body: object = None, *, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """`body` is JSON unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if data is None else {"Content-Type": "application/json"}
        prepared = urllib.request.Request(self.url + path, data, {**kind, **(headers or {})}, method=method)
        try:
            with urllib.request.urlopen(prepared, timeout=60) as found:
                return Answer(found.status, found.headers, found.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def chat(self, **fields: Any) -> Answer:
        return self.request("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **fields})

    def complete(self, prompt: Any = "Hi", **fields: Any) -> Answer:
        return self.request("/v1/completions", {"prompt": prompt, **fields})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def end(self) -> None:
        """Starts draining, as the first SIGTERM does."""
        self.server.handle_exit(15, None)


def events(body: bytes) -> Iterator[Any]:
    """Returns the events of a stream, which must end as OpenAI's streams do."""
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part and not part.startswith(b":")]
    assert parts[-1] == b"[DONE]"
    yield from map(json.loads, parts[:-1])


def until(condition: Callable[[], object], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@contextmanager
def serving(
    settings: ServerSettings | None = None,
    *,
    names: tuple[str, ...] = ("tiny",),
    llm: Callable[[], AsyncLLM] = AsyncLLM,
    on_demand: Mapping[str, OnDemand] | None = None,
    ready: bool = True,
) -> Generator[Live]:
    """A server of one model, which it has loaded if it is to be ready, or of models that it loads on demand."""
    made: list[AsyncLLM] = []

    def load() -> Mapping[str, AsyncLLM | OnDemand]:
        if on_demand is not None:
            return on_demand
        made.append(llm())
        return dict.fromkeys(names, made[0])

    listener = listen("127.0.0.1", 0)
    server = Server(load, settings or ServerSettings(), "127.0.0.1")
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run_until_ended(listener)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        until(lambda: failures or (server.started and (server.models.ready or not ready)))
        assert not failures
        yield Live(server, listener.getsockname()[1], made[0] if made else None, thread)
    finally:
        if thread.is_alive():
            server.handle_exit(15, None)
            server.handle_exit(15, None)
        thread.join(180)
        listener.close()
        assert not thread.is_alive()
    assert not failures
