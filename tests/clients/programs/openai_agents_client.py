# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "openai-agents==0.24.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""OpenAI Agents SDK: an agent with a tool, with and without `output_type`, over chat and over Responses."""

import asyncio
import sys
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


calls: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    calls.append(city)
    return "21 degrees"


async def main() -> None:
    """Runs each kind of agent, and streams the last."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for api in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            for choice in ("auto", "required"):
                for output_type in (None, Report):
                    fields: dict[str, Any] = {} if output_type is None else {"output_type": output_type}
                    agent = Agent(
                        name="reporter",
                        instructions="Answer with the weather.",
                        model=api(model, client),
                        model_settings=ModelSettings(tool_choice=choice),
                        tools=[get_weather],
                        **fields,
                    )
                    calls.clear()
                    result = await Runner.run(agent, "What is the weather in Paris?")
                    assert calls == ["Paris"], calls
                    check(result.final_output, output_type)
            streamed = Runner.run_streamed(agent, "What is the weather in Paris?")
            events = [event async for event in streamed.stream_events()]
            assert len(events) > 5
            check(streamed.final_output, output_type)


def check(found: Any, output_type: type[Report] | None) -> None:
    """Compares the last output of an agent with the expected one."""
    if output_type is None:
        assert isinstance(found, str)
        assert found
    else:
        assert found == Report(city="Paris", celsius=21)


asyncio.run(main())
