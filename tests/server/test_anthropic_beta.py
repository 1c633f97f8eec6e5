"""`client.beta.messages` of Anthropic's own client on a fake engine: a loop that runs tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool
from anthropic.lib.tools import BetaFunctionTool
from anthropic.types.beta import BetaMessage, BetaMessageParam

from server.live import Live
from server.scripted_server import CALLS, CITY, THOUGHT, ScriptedServer

MESSAGES: list[BetaMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
DONE = "It is sunny in both."


def client_of(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


@pytest.fixture
def scripted(scripted: ScriptedServer) -> ScriptedServer:
    """A server that thinks, asks for the weather in two cities, and answers after the tool results."""
    tokenize = scripted.live.llm.tokenize
    asking = tokenize(f"<think>\n{THOUGHT}\n</think>\n\n{CALLS}", add_special_tokens=False)
    done = tokenize(DONE, add_special_tokens=False)

    def script(prompt: list[int]) -> list[int]:
        scripted.prompts.append(scripted.live.llm.detokenize(prompt, skip_special_tokens=False))
        return done if "Sunny" in scripted.prompts[-1] else asking

    scripted.engine.script = staticmethod(script)
    return scripted


def weather_of(cities: list[str], *, fails: bool = False) -> BetaFunctionTool[Callable[..., str]]:
    def weather(city: str) -> str:
        """Ask for the weather.

        Args:
            city: Where.
        """
        cities.append(city)
        if fails:
            raise ValueError("no Sunny day")
        return "Sunny."

    return beta_tool(weather)


def check_run(messages: list[BetaMessage], scripted: ScriptedServer) -> None:
    """Checks a run: a question, two tool calls, and an answer with their results."""
    calling, final = messages
    assert [block.type for block in calling.content] == ["thinking", "tool_use", "tool_use"]
    assert (calling.stop_reason, final.stop_reason) == ("tool_use", "end_turn")
    (block,) = final.content
    assert block.type == "text"
    assert block.text == DONE
    first, second = dict.fromkeys(scripted.prompts)  # each is looked at for every token
    assert "Sunny" not in first
    assert second.count("Sunny.") == 2


@pytest.mark.parametrize("options", [{}, {"thread": False}, {"max_iterations": 5}], ids=str)
def test_tool_runner_runs_tools(scripted: ScriptedServer, options: dict[str, Any]) -> None:
    """The client first asks for a thread on the server, and continues without one."""
    cities: list[str] = []
    with client_of(scripted.live) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=500, messages=MESSAGES, tools=[weather_of(cities)], **options
        )
        check_run(list(runner), scripted)
    assert cities == [CITY, "Rome"]


@pytest.mark.parametrize("eagerly", [False, True])
def test_tool_runner_streams(scripted: ScriptedServer, eagerly: bool) -> None:
    cities: list[str] = []
    with client_of(scripted.live) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=500,
            messages=MESSAGES,
            tools=[weather_of(cities)],
            stream=True,
            run_tools_eagerly=eagerly,
        )
        messages = [stream.get_final_message() for stream in runner]
        check_run([BetaMessage.model_validate(message.model_dump()) for message in messages], scripted)
    assert cities == [CITY, "Rome"]


def test_async_tool_runner_runs_tools(scripted: ScriptedServer) -> None:
    cities: list[str] = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """Ask for the weather."""
        cities.append(city)
        return "Sunny."

    async def run() -> list[BetaMessage]:
        async with anthropic.AsyncAnthropic(base_url=scripted.live.url, api_key="none", max_retries=0) as client:
            runner = client.beta.messages.tool_runner(model="tiny", max_tokens=500, messages=MESSAGES, tools=[weather])
            return [message async for message in runner]

    check_run(asyncio.run(run()), scripted)
    assert cities == [CITY, "Rome"]


def test_tool_error_is_sent_to_model(scripted: ScriptedServer) -> None:
    with client_of(scripted.live) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=500, messages=MESSAGES, tools=[weather_of([], fails=True)]
        )
        assert runner.until_done().stop_reason == "end_turn"
    assert scripted.prompts[-1].count("Error: ") == 2
    assert "no Sunny day" in scripted.prompts[-1]


def test_thread_is_rejected_with_error_code_known_to_client(scripted: ScriptedServer) -> None:
    with client_of(scripted.live) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.beta.messages.create(model="tiny", max_tokens=4, messages=MESSAGES, thread={"type": "create"})
        body: Any = caught.value.body
        message = "thread is not supported: the server stores no conversations; send all messages"
        assert body["error"]["message"] == message
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        thread = client.beta.messages.thread(
            model="tiny", max_tokens=500, messages=MESSAGES, unsupported_request_behavior="continue_unthreaded"
        )
        assert thread.send().stop_reason == "end_turn"
        assert "details" not in _refused(client, container="c")["error"]


def _refused(client: anthropic.Anthropic, **fields: Any) -> Any:
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": MESSAGES, **fields}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.beta.messages.create(**request)
    return caught.value.body
