# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "pydantic-ai-slim[openai,anthropic]==2.68.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""Pydantic AI: agents with a tool and each kind of output, over chat, Responses, Messages and Ollama's route."""

import sys

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.ollama import OllamaModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider

url, model = sys.argv[1:]


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


openai = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="none", max_retries=0))
MODELS: list[Model] = [
    OpenAIChatModel(model, provider=openai),
    OpenAIChatModel(model, provider=VLLMProvider(base_url=f"{url}/v1")),
    OpenAIResponsesModel(model, provider=openai),
    # It knows from its name what a model of Anthropic supports.
    AnthropicModel(model, provider=anthropic, profile={"supports_json_schema_output": True}),
    OllamaModel(model, provider=OllamaProvider(base_url=f"{url}/v1")),
]
calls: list[str] = []
QUESTION = "What is the weather in Paris?"

for chat in MODELS:
    for output in (str, ToolOutput(Report), NativeOutput(Report), PromptedOutput(Report)):
        agent = Agent(chat, output_type=output, system_prompt="Answer with the weather.")
        calls.clear()

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Get the weather in a city."""
            calls.append(city)
            return "21 degrees"

        found = agent.run_sync(QUESTION).output
        assert calls == ["Paris"], calls
        assert found if output is str else found == Report(city="Paris", celsius=21), found
        stream = agent.run_stream_sync(QUESTION)
        assert stream.get_output() == found

embedder = Embedder(OpenAIEmbeddingModel(model, provider=openai))
one, two = embedder.embed_documents_sync(["Paris", "The capital of Italy"]).embeddings
assert len(one) == len(two) > 0
