# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "llama-index-llms-openai-like==0.8.1",
#     "llama-index-embeddings-openai-like==0.4.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""LlamaIndex: `OpenAILike` with chat, streams, tools, structured prediction, an agent, and embeddings in an index."""

import asyncio
import sys
from typing import Any

from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, model = sys.argv[1:]
fields: dict[str, Any] = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
QUESTION = "What is the weather in Paris?"


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


calls: list[str] = []


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    calls.append(city)
    return "21 degrees"


REPORT = Report(city="Paris", celsius=21)
llm = OpenAILike(**fields, is_chat_model=True, is_function_calling_model=True)
messages = [ChatMessage(role="user", content=QUESTION)]

# Chat, and the same as a stream; a completion of text.
text = llm.chat(messages).message.content
assert text
assert "".join(chunk.delta or "" for chunk in llm.stream_chat(messages)) == text
assert OpenAILike(**fields, is_chat_model=False, max_tokens=5).complete("Once upon a time").text

# A tool, alone and in the loop of an agent.
response = llm.chat_with_tools([FunctionTool.from_defaults(get_weather)], user_msg=QUESTION)
(call,) = llm.get_tool_calls_from_response(response)
assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})


async def run_agent() -> str:
    """Returns the answer of an agent with a tool."""
    return str(await FunctionAgent(tools=[get_weather], llm=llm).run(user_msg=QUESTION))


assert asyncio.run(run_agent()) == text
assert calls == ["Paris"]

# A parsed answer, by a tool and by a schema.
assert llm.structured_predict(Report, PromptTemplate(QUESTION)) == REPORT
strict = OpenAILike(**fields, is_chat_model=True, should_use_structured_outputs=True)
assert strict.structured_predict(Report, PromptTemplate(QUESTION)) == REPORT

# Embeddings, in an index with a query.
embeddings = OpenAILikeEmbedding(
    model_name=model, api_base=f"{url}/v1", api_key="none", max_retries=0, embed_batch_size=2
)
documents = [Document(text=f"It is {degrees} degrees.") for degrees in (3, 12, 21)]
index = VectorStoreIndex.from_documents(documents, embed_model=embeddings)
assert len(index.as_retriever(similarity_top_k=2).retrieve(QUESTION)) == 2
assert str(index.as_query_engine(llm=llm).query(QUESTION)) == text
