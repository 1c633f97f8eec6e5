# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "litellm[mcp]==1.106.2",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""LiteLLM through its providers openai, hosted_vllm, anthropic, ollama and ollama_chat."""

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel

url, model = sys.argv[1:]
PROVIDERS = {
    "openai": f"{url}/v1",
    "hosted_vllm": f"{url}/v1",
    "anthropic": url,
    "ollama": url,
    "ollama_chat": url,
}


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather in a city.", "parameters": parameters},
}
messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

for provider, base in PROVIDERS.items():
    asked: dict[str, Any] = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "num_retries": 0}

    # Chat, and the same as a stream.
    answer: Any = litellm.completion(**asked, messages=messages)
    text = answer.choices[0].message.content
    assert text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0
    stream: Any = litellm.completion(**asked, messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text

    # A parsed answer.
    answer = litellm.completion(**asked, messages=messages, response_format=Report)
    assert Report.model_validate_json(answer.choices[0].message.content) == Report(city="Paris", celsius=21)

    # Embeddings; the other providers have none.
    if provider in ("openai", "hosted_vllm", "ollama"):
        found: Any = litellm.embedding(**asked, input=["Paris", "The capital of Italy"])
        assert len(found.data[0]["embedding"]) == len(found.data[1]["embedding"]) > 0

    # A tool: the call, its result, the answer. `ollama` does not send tools, but describes them in the prompt.
    if provider == "ollama":
        continue
    called: Any = litellm.completion(**asked, messages=messages, tools=[tool])
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "21 degrees"}
    sent = [*messages, called.choices[0].message, result]
    answer = litellm.completion(**asked, messages=sent, tools=[tool])
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
