"""Ollama's API on a fake engine: thinking and tools, what fails, and servers that have no such API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

import fakes
from conftest import TINY
from ferrule import AsyncLLM
from ferrule.server import ServerSettings
from server.live import Live, serving
from server.scripted_server import ANSWER, CITY, PARAMETERS, SAID, THOUGHT, ScriptedServer

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Ask.", "parameters": PARAMETERS}}]
MESSAGES = [{"role": "user", "content": "Hi"}]
PATHS = ("chat", "generate", "embed", "show")


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[ollama.Client]:
    with ollama.Client(scripted.live.url) as client:
        yield client


def test_thinking_and_tool_calls(scripted: ScriptedServer, client: ollama.Client) -> None:
    whole = client.chat("tiny", MESSAGES, tools=TOOLS, think=True).message
    assert (whole.thinking, whole.content) == (THOUGHT, SAID)
    called = [(call.function.name, call.function.arguments) for call in whole.tool_calls or ()]
    assert called == [("weather", {"city": CITY}), ("weather", {"city": "Rome"})]
    for stream in (False, True):
        request = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "stream": stream}
        lines = map(json.loads, scripted.live.request("/api/chat", request).body.splitlines())
        indices = [call["function"]["index"] for line in lines for call in line["message"].get("tool_calls", ())]
        assert indices == [0, 1]
    thinking = content = ""
    calls: list[Any] = []
    for line in client.chat("tiny", MESSAGES, tools=TOOLS, stream=True):
        thinking += line.message.thinking or ""
        content += line.message.content or ""
        calls += line.message.tool_calls or []
    assert (thinking, content) == (THOUGHT, SAID)
    assert [(call.function.name, call.function.arguments) for call in calls] == called
    generated = client.generate("tiny", "Hi", think=True)
    assert generated.thinking == THOUGHT
    assert (generated.response or "").startswith(SAID)
    raw = client.generate("tiny", "Hi", raw=True)
    assert raw.response == ANSWER


def test_response_message_is_accepted_as_input(scripted: ScriptedServer, client: ollama.Client) -> None:
    message = client.chat("tiny", MESSAGES, tools=TOOLS).message
    results = [{"role": "tool", "tool_name": "weather", "content": "Sunny."} for _ in message.tool_calls or ()]
    client.chat("tiny", [*MESSAGES, message, *results], tools=TOOLS)
    assert SAID in scripted.prompts[-1]
    assert scripted.prompts[-1].count("Sunny.") == 2


@pytest.mark.parametrize("think", [True, False, "high"])
def test_think_is_passed_to_chat_template(
    engine: type[fakes.Engine], model_with: Callable[..., Path], think: bool | str
) -> None:
    directory = model_with()
    (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    (directory / "chat_template.jinja").write_text("{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}")
    prompts: list[list[int]] = []

    def script(prompt: list[int]) -> list[int]:
        prompts.append(prompt)
        return []

    engine.script = staticmethod(script)  # type: ignore[assignment]
    settings = ServerSettings(ollama=True, reasoning_parser="qwen3")
    with serving(settings, llm=lambda: AsyncLLM(directory)) as live:
        request = {"model": "tiny", "messages": MESSAGES, "think": think, "stream": False}
        assert live.request("/api/chat", request).status == 200
        prompt_text = live.llm.detokenize(prompts[0])
    assert prompt_text.split() == [str(bool(think))] * 2 + (["high"] if think == "high" else [])


def test_a_prompt_for_a_model_without_a_template_is_used_as_it_is(
    engine: type[fakes.Engine], model_with: Callable[..., Path]
) -> None:
    directory = model_with()
    (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    prompts: list[list[int]] = []

    def script(prompt: list[int]) -> list[int]:
        prompts.append(prompt)
        return []

    engine.script = staticmethod(script)  # type: ignore[assignment]
    with serving(ServerSettings(ollama=True), llm=lambda: AsyncLLM(directory)) as live:
        asked = {"model": "tiny", "prompt": "Once upon a", "stream": False}
        for fields in ({}, {"raw": True}):
            answer = live.request("/api/generate", {**asked, **fields})
            assert answer.status == 200, answer.body
        refused = live.request("/api/generate", {**asked, "system": "Be brief."})
        assert (refused.status, refused.json["error"].split()[0]) == (400, "system")
        assert prompts == [live.llm.tokenize("Once upon a")] * 2


def test_logprobs_with_thinking_are_rejected(scripted: ScriptedServer) -> None:
    answer = scripted.live.request("/api/chat", {"model": "tiny", "messages": MESSAGES, "logprobs": True})
    assert answer.status == 400
    assert answer.json["error"].startswith("logprobs ")


def test_failed_stream_ends_with_error_line(scripted: ScriptedServer) -> None:
    scripted.engine.step_seconds = 0.02
    scripted.engine.error_at = 30
    body = scripted.live.request("/api/chat", {"model": "tiny", "messages": MESSAGES}).body
    first, *_, last = [json.loads(line) for line in body.splitlines()]
    assert first["message"]["thinking"]
    assert last.keys() == {"error"}


def test_draining_server_returns_503(scripted: ScriptedServer, client: ollama.Client) -> None:
    scripted.live.server.models.draining = True
    with pytest.raises(ollama.ResponseError, match="shutting down") as caught:
        client.chat("tiny", MESSAGES)
    assert caught.value.status_code == 503


def test_middleware_errors_have_ollama_format(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(ollama=True, api_keys=["secret"])) as live:
        for answer in (live.request("/api/tags"), live.request("/api/chat", {})):
            assert answer.status == 401
            assert answer.json.keys() == {"error"}
        key = {"Authorization": "Bearer secret"}
        assert live.request("/api/tags", headers=key).json["models"][0]["name"] == "tiny"
        assert live.request("/api/chat", b"{:", headers=key).json.keys() == {"error"}


def test_ollama_api_is_disabled_by_default(live: Live) -> None:
    for path in PATHS:
        assert live.request(f"/api/{path}", {"model": "tiny"}).status in (404, 405)
    assert live.request("/api/tags").status == 404
    assert not [path for path in live.request("/openapi.json").json["paths"] if path.startswith("/api")]
