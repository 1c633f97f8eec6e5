# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "dspy[numpy]==3.4.1",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""DSPy: predictions in JSON, native function calls, embeddings."""

import sys
from typing import Any

import dspy
from dspy.lm15 import (
    AccessPolicy,
    EndpointSupport,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)

url, model = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
endpoints = EndpointSupport(complete=True, stream=True, models=True)
access = AccessPolicy(provider="ferrule", supports=endpoints, auth_modes=("bearer",), base_url=f"{url}/v1")
register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm")),
    supports=ModelSupport(function_calling=True, response_schema=True),
)
fields: dict[str, Any] = {"api_key": "none", "cache": False, "num_retries": 0}
LMS = dspy.LM(f"ferrule/{model}", **fields), dspy.LM(f"openai/{model}", api_base=f"{url}/v1", **fields)


class Weather(dspy.Signature):
    """Answer with the weather."""

    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    celsius: int = dspy.OutputField()


class Calls(dspy.Signature):
    """Call tools that answer the question."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return "21 degrees"


text, same = (lm(QUESTION) for lm in LMS)
assert text == same != [""]
for lm in LMS:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Weather)(question=QUESTION)
        assert (found.city, found.celsius) == ("Paris", 21)
# DSPy sends tools to providers that are declared to support them.
with dspy.context(lm=LMS[0], adapter=dspy.JSONAdapter(use_native_function_calling=True)):
    (call,) = dspy.Predict(Calls)(question=QUESTION, tools=[dspy.Tool(get_weather)]).calls.tool_calls
    assert (call.name, call.args) == ("get_weather", {"city": "Paris"})

one, two = dspy.Embedder(f"openai/{model}", api_base=f"{url}/v1", api_key="none", caching=False)(
    ["Paris", "The capital of Italy"]
)
assert len(one) == len(two) > 0
