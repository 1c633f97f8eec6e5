# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "smolagents[openai]==1.26.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""smolagents: `OpenAIModel`, streams, an agent that calls tools."""

import sys

from smolagents import ChatMessageStreamDelta, OpenAIModel, ToolCallingAgent, tool

url, model = sys.argv[1:]
llm = OpenAIModel(model_id=model, api_base=f"{url}/v1", api_key="none")
calls: list[str] = []


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: Name of the city.
    """
    calls.append(city)
    return "21 degrees"


# Chat, and the same as a stream.
messages = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]
answer = llm.generate(messages)
assert answer.content
assert answer.token_usage.output_tokens > 0
deltas: list[ChatMessageStreamDelta] = list(llm.generate_stream(messages))
assert "".join(delta.content or "" for delta in deltas) == answer.content

# The agent calls its tool, and then `final_answer`.
for stream in (False, True):
    calls.clear()
    agent = ToolCallingAgent(tools=[get_weather], model=llm, max_steps=3, verbosity_level=0, stream_outputs=stream)
    assert agent.run("What is the weather in Paris?") == "21 degrees"
    assert calls == ["Paris"]
