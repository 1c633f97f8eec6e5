# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ollama==0.6.3",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""Ollama's client: chat, streams, tools, a schema, embeddings."""

import sys

from ollama import Client
from pydantic import BaseModel

url, model = sys.argv[1:]
client = Client(url)


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: Name of the city.

    Returns:
        The temperature.
    """
    return f"21 degrees in {city}"


messages = [{"role": "user", "content": "What is the weather in Paris?"}]

# Chat, and the same as a stream.
answer = client.chat(model, messages)
assert answer.done_reason == "stop"
assert answer.message.content
*chunks, last = client.chat(model, messages, stream=True)
assert "".join(chunk.message.content or "" for chunk in chunks) == answer.message.content
assert last.eval_count == answer.eval_count
assert client.generate(model, "What is the weather in Paris?").response == answer.message.content

# A tool: the call, its result, the answer.
called = client.chat(model, messages, tools=[get_weather])
(call,) = called.message.tool_calls or []
assert call.function.name == "get_weather"
result = {"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)}
assert client.chat(model, [*messages, called.message, result], tools=[get_weather]).message.content
streamed = client.chat(model, messages, tools=[get_weather], stream=True)
assert [call for chunk in streamed for call in chunk.message.tool_calls or []] == [call]

# A schema.
answer = client.chat(model, messages, format=Report.model_json_schema())
assert Report.model_validate_json(answer.message.content or "") == Report(city="Paris", celsius=21)

# Embeddings and models.
one, two = client.embed(model, ["Paris", "The capital of Italy"]).embeddings
assert len(one) == len(two) > 0
assert model in [each.model for each in client.list().models]
assert client.show(model).capabilities
