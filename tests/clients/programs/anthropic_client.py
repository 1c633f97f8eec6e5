# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "anthropic==2.12.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""Anthropic's client: messages, streams, tools, parsed answers, the tool runner."""

import sys
from typing import Any

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

url, model = sys.argv[1:]
client = Anthropic(base_url=url, api_key="none", max_retries=0)


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


REPORT = Report(city="Paris", celsius=21)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool: Any = {"name": "get_weather", "description": "Get the weather in a city.", "input_schema": schema}
messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
asked: dict[str, Any] = {"model": model, "max_tokens": 200, "messages": messages}

# A message, and the same as a stream.
answer = client.messages.create(**asked, system="Be brief.")
assert answer.stop_reason == "end_turn"
(block,) = answer.content
assert block.type == "text"
with client.messages.stream(**asked, system="Be brief.") as stream:
    assert "".join(stream.text_stream) == block.text
    assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 0

# A tool: the call, its result, the answer.
for choice in ("auto", "any", "tool"):
    named = {"name": "get_weather"} if choice == "tool" else {}
    called = client.messages.create(**asked, tools=[tool], tool_choice={"type": choice, **named})
    assert called.stop_reason == "tool_use"
    use = called.content[-1]
    assert use.type == "tool_use"
    assert use.input == {"city": "Paris"}
with client.messages.stream(**asked, tools=[tool]) as stream:
    (use,) = stream.get_final_message().content
    assert use.type == "tool_use"
    assert use.input == {"city": "Paris"}
result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}
messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
answer = client.messages.create(**asked, tools=[tool])
assert answer.stop_reason == "end_turn"

# A parsed answer, and the loop that runs tools.
assert client.messages.parse(**asked, output_format=Report).parsed_output == REPORT


@beta_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    calls.append(city)
    return "21 degrees"


calls: list[str] = []
runner = client.beta.messages.tool_runner(**{**asked, "messages": messages[:1]}, tools=[get_weather])
last = runner.until_done()
assert calls == ["Paris"]
assert last.content[0].type == "text"
