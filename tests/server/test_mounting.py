"""The server mounted in another application, several models, and loading and unloading of adapters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

import fakes
from conftest import TINY
from ferrule import AsyncLLM
from ferrule._cli import main
from ferrule._cli.served_models import load_models
from ferrule.errors import InvalidParameterError
from ferrule.server import Models, ServerSettings, create_app, serve
from ferrule.server.models import ServedModel
from lora_files import random_adapter
from server.live import Live, listen, serving, until

SECRET = {"X-Api-Key": "secret"}


def test_app_is_mounted_in_application_with_lifespan(engine: type[fakes.Engine]) -> None:
    models = Models()
    closed: list[bool] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
        async with AsyncLLM() as llm:
            models.set({"mine": llm})
            yield
        closed.append(True)

    app = FastAPI(lifespan=lifespan)
    app.mount("/llm", create_app(models, ServerSettings(api_keys=["secret"])))

    @app.get("/own")
    async def own() -> str:
        return "own"

    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        live = Live(None, listener.getsockname()[1], None, thread)  # type: ignore[arg-type]
        until(lambda: server.started)
        assert live.request("/own").json == "own"
        assert live.request("/llm/health").json == {"status": "ok"}
        assert live.request("/llm/v1/models").status == 401
        assert live.request("/llm/v1/models", headers=SECRET).json["data"][0]["id"] == "mine"
        assert live.request("/llm/v1/messages", {}).json["type"] == "error", "in the form of its API"
        body = {"prompt": "Hi", "max_tokens": 3, "stream": True}
        assert live.request("/llm/v1/completions", body, headers=SECRET).status == 200
        page = live.request("/llm/", headers=SECRET)
        assert page.status == 200
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
    assert closed


def test_requests_during_model_load_return_503(engine: type[fakes.Engine]) -> None:
    gate = threading.Event()

    def load() -> AsyncLLM:
        gate.wait(60)
        return AsyncLLM()

    with serving(llm=load, ready=False) as live:
        try:
            for answer in (live.request("/health"), live.chat(), live.request("/v1/models")):
                assert (answer.status, answer.error["code"]) == (503, "loading")
                assert answer.headers["Retry-After"]
            assert live.request("/metrics").status == 200
        finally:
            gate.set()
        until(lambda: live.request("/health").status == 200)


def test_load_error_ends_server() -> None:
    def load() -> dict[str, AsyncLLM]:
        raise InvalidParameterError("threads", 0, ">= 1")

    urls: list[str] = []
    with pytest.raises(InvalidParameterError, match="threads must be >= 1, got 0"):
        serve(load, port=0, on_listening=urls.append)
    assert urls[0].startswith("http://127.0.0.1:")


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_parser_that_cannot_be_derived_is_an_error_at_start(engine: type[fakes.Engine], option: str) -> None:
    settings = ServerSettings(chat_template="{{ messages[0].content }}{{ tools }}", **{option: "template"})  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match=rf"{option} must be another parser, since none can be derived"):
        load_models({"tiny": None}, {}, settings)


def test_port_in_use_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(listen("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


USAGE: list[tuple[list[str], str]] = [
    (["--port", "70000"], "70000 is not in the range"),
    (["--model", "a"], "--model must be NAME=MODEL, got 'a'"),
    (["--lora-modules", "a="], "--lora-modules must be NAME=PATH, got 'a='"),
    (["--model", "a=/no/such/model"], "no directory /no/such/model"),
    (["/no/such/model"], "no directory /no/such/model"),
    (
        ["--metrics-prefix", "a b"],
        "metrics_prefix must be letters, digits, _ and :, not beginning with a digit, got 'a b'",
    ),
    (["--request-timeout", "-1"], "request_timeout"),
    (["--api-key", " a"], "api_keys[0] must be"),
    (["--threads", "0"], "error: threads must be an integer from 1 to 1024, got 0\n"),
    (["--max-queued-requests", "0"], "error: max_queued_requests must be an integer from 1 to 2147483647, got 0\n"),
    (["--tool-call-parser", "nonsense"], "'nonsense'"),
    (["--chat-template", "/no/such/file"], "--chat-template: cannot read /no/such/file"),
    (["--served-model-name", "a", "--model", "b=c"], "--served-model-name requires MODEL"),
    (["--model-keep-alive", "soon"], "--model-keep-alive must be a number of seconds or a duration such as '5m'"),
    (["--max-loaded-models", "0"], "error: max_loaded_models must be an integer from 1 to 1048576, got 0\n"),
    (["--fallback-url", "example.org"], "fallback_url must be a URL such as https://example.org/v1, got 'example.org'"),
    (["--fallback-when", "never"], "'never' is not one of 'queue', 'length', 'model', 'error'"),
    (["--fallback-after", "0"], "fallback_after must be"),
    (["--fallback-key-env", "NO_SUCH_KEY"], "--fallback-key-env: the environment variable NO_SUCH_KEY is not set"),
    (["--unknown-fields", "drop"], "'drop' is not one of 'reject', 'warn', 'ignore'"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_invalid_arguments_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors


def test_models_are_selected_by_name(engine: type[fakes.Engine]) -> None:
    with serving(names=("first", "second")) as live:
        assert [card["id"] for card in live.request("/v1/models").json["data"]] == ["first", "second"]
        assert live.chat(max_tokens=1).json["model"] == "first"
        assert live.chat(max_tokens=1, model="second").json["model"] == "second"
        assert live.request("/v1/models/second").json["id"] == "second"
        assert live.request("/v1/models/se%2Fcond").status == 404


def test_page_is_served_with_content_security_policy(live: Live) -> None:
    found = live.request("/")
    assert found.status == 200
    policy = found.headers["Content-Security-Policy"].split("; ")
    assert "default-src 'none'" in policy
    assert not [rule for rule in policy if "unsafe" in rule or "*" in rule or "http" in rule]
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/none.js"):
        assert live.request(path).status == 404
    assert live.request("/", b"{}").status == 404
    with serving(ServerSettings(page=False)) as closed:
        assert closed.request("/").status == 404


@pytest.mark.native
def test_adapters_are_loaded_and_unloaded(tmp_path: Path) -> None:
    random_adapter(tmp_path / "adapters" / "mine", TINY, seed=1, alpha=64)
    random_adapter(tmp_path / "outside", TINY, seed=2)
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    with serving(ServerSettings(lora_dir=str(tmp_path / "adapters"))) as live:
        plain = live.complete(temperature=0, max_tokens=8).json["choices"][0]["text"]
        load = {"lora_name": "mine", "lora_path": "mine"}
        found = live.request("/v1/load_lora_adapter", load)
        assert (found.status, found.json["parent"]) == (200, "tiny")
        assert [card["id"] for card in live.request("/v1/models").json["data"]] == ["tiny", "mine"]
        answer = live.complete(model="mine", temperature=0, max_tokens=8).json
        assert answer["model"] == "mine"
        assert answer["choices"][0]["text"] != plain
        assert live.request("/v1/load_lora_adapter", load).error["param"] == "lora_name"
        assert live.request("/v1/unload_lora_adapter", {"lora_name": "tiny"}).status == 400
        assert live.request("/v1/embeddings", {"model": "mine", "input": "a"}).error["param"] == "model"
        assert live.request("/v1/unload_lora_adapter", {"lora_name": "mine"}).status == 200
        assert live.complete(model="mine").status == 404
        for path in ("../outside", str(tmp_path / "outside"), "link", "a\0b"):
            found = live.request("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": path})
            assert (found.status, found.error["param"]) == (403, "lora_path"), path
        found = live.request("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "none"})
        assert found.status == 404


@pytest.mark.native
@pytest.mark.parametrize("stream", [False, True])
def test_adapter_unloaded_during_request_returns_404(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    random_adapter(tmp_path / "mine", TINY, seed=1)
    lease_before = Models.lease

    @asynccontextmanager
    async def lease(models: Models, name: str | None, keep_alive: float | None = None) -> AsyncGenerator[ServedModel]:
        async with lease_before(models, name, keep_alive) as served:
            served.llm._adapters.unload("mine")
            yield served

    with serving(ServerSettings(lora_dir=str(tmp_path))) as live:
        live.request("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "mine"})
        monkeypatch.setattr(Models, "lease", lease)
        answer = live.complete(model="mine", stream=stream)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_adapter_loading_is_disabled_by_default(live: Live) -> None:
    found = live.request("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"})
    assert (found.status, found.error["code"]) == (403, "adapters_closed")
