# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "haystack-ai==3.4.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""Haystack: chat generator with streams, tools and schemas, an agent, embedders, a pipeline."""

import sys
from typing import Any

from haystack import Document, Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

url, model = sys.argv[1:]
fields: dict[str, Any] = {
    "api_key": Secret.from_token("none"),
    "api_base_url": f"{url}/v1",
    "model": model,
    "max_retries": 0,
}
QUESTION = "What is the weather in Paris?"


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


calls: list[str] = []


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    calls.append(city)
    return "21 degrees"


messages = [ChatMessage.from_user(QUESTION)]
parts: list[str] = []

for generator in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
    # Chat, and the same as a stream.
    (reply,) = generator(**fields).run(messages)["replies"]
    assert reply.text
    parts.clear()
    streamed = generator(**fields, streaming_callback=lambda chunk: parts.append(chunk.content)).run(messages)
    assert "".join(parts) == streamed["replies"][0].text == reply.text

    # A tool, alone and in the loop of an agent.
    (called,) = generator(**fields, tools=[get_weather]).run(messages)["replies"]
    assert called.tool_call.arguments == {"city": "Paris"}
    calls.clear()
    agent = Agent(chat_generator=generator(**fields), tools=[get_weather])
    assert agent.run(messages)["last_message"].text == reply.text
    assert calls == ["Paris"]

    # An answer in the form of a schema.
    key = "response_format" if generator is OpenAIChatGenerator else "text_format"
    (parsed,) = generator(**fields, generation_kwargs={key: Report}).run(messages)["replies"]
    assert Report.model_validate_json(parsed.text) == Report(city="Paris", celsius=21)

# A pipeline that retrieves documents and answers.
store = InMemoryDocumentStore()
documents = [Document(content=f"It is {degrees} degrees.") for degrees in (3, 12, 21)]
store.write_documents(OpenAIDocumentEmbedder(**fields).run(documents)["documents"])
template = [ChatMessage.from_user("{% for each in documents %}{{ each.content }}{% endfor %} {{ question }}")]
pipeline = Pipeline()
pipeline.add_component("embedder", OpenAITextEmbedder(**fields))
pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=2))
pipeline.add_component("prompt", ChatPromptBuilder(template=template, required_variables="*"))
pipeline.add_component("generator", OpenAIChatGenerator(**fields))
pipeline.connect("embedder.embedding", "retriever.query_embedding")
pipeline.connect("retriever.documents", "prompt.documents")
pipeline.connect("prompt.prompt", "generator.messages")
result = pipeline.run({"embedder": {"text": QUESTION}, "prompt": {"question": QUESTION}})
assert result["generator"]["replies"][0].text
