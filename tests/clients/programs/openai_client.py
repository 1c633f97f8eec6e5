# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "openai==3.54.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""OpenAI's client: chat, streams, tools, parsed answers, Responses, embeddings."""

import sys
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


QUESTION = "What is the weather in Paris?"
REPORT = Report(city="Paris", celsius=21)
tool = pydantic_function_tool(GetWeather, name="get_weather")
messages: list[Any] = [{"role": "user", "content": QUESTION}]

# Chat, and the same as a stream.
answer = client.chat.completions.create(model=model, messages=messages)
text = answer.choices[0].message.content
assert text
assert answer.choices[0].finish_reason == "stop"
assert answer.usage is not None
stream = client.chat.completions.create(
    model=model, messages=messages, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage == answer.usage

# A tool: the call, its result, the answer.
for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
    called = client.chat.completions.parse(model=model, messages=messages, tools=[tool], tool_choice=choice)
    assert called.choices[0].finish_reason in ("tool_calls", "stop")
    (call,) = called.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")
result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
sent = [*messages, called.choices[0].message, result]
answer = client.chat.completions.create(model=model, messages=sent, tools=[tool])
assert answer.choices[0].finish_reason == "stop"
assert answer.choices[0].message.content
with client.chat.completions.stream(model=model, messages=messages, tools=[tool]) as events:
    (call,) = events.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")

# A parsed answer, alone and after the result of a tool.
parsed = client.chat.completions.parse(model=model, messages=messages, response_format=Report)
assert parsed.choices[0].message.parsed == REPORT
parsed = client.chat.completions.parse(model=model, messages=sent, tools=[tool], response_format=Report)
assert parsed.choices[0].message.parsed == REPORT
with client.chat.completions.stream(model=model, messages=messages, response_format=Report) as events:
    assert events.get_final_completion().choices[0].message.parsed == REPORT

# Responses.
response = client.responses.create(model=model, input=QUESTION)
assert response.output_text == text
with client.responses.stream(model=model, input=QUESTION) as events:
    assert events.get_final_response().output_text == text
assert client.responses.parse(model=model, input=QUESTION, text_format=Report).output_parsed == REPORT
function: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": GetWeather.model_json_schema(),
    "strict": True,
}
response = client.responses.create(model=model, input=QUESTION, tools=[function])
(item,) = response.output
assert item.type == "function_call"
assert GetWeather.model_validate_json(item.arguments).city == "Paris"
output = {"type": "function_call_output", "call_id": item.call_id, "output": "21 degrees"}
response = client.responses.create(model=model, input=[*messages, item, output], tools=[function])
assert response.output_text == text

# Embeddings, completions, models.
texts = ["Paris", "The capital of Italy"]
found = client.embeddings.create(model=model, input=texts)
assert [len(each.embedding) for each in found.data] == [len(found.data[0].embedding)] * 2
plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
assert plain.data[0].embedding == found.data[0].embedding
completed = client.completions.create(model=model, prompt="Once upon a time", max_tokens=5)
assert completed.choices[0].text
assert model in [each.id for each in client.models.list()]
