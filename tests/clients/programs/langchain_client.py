# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "langchain==1.4.7",
#     "langchain-openai==1.7.3",
#     "langchain-anthropic==1.7.7",
#     "langchain-ollama==1.1.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""LangChain: chat models for the APIs of OpenAI, Anthropic and Ollama, with agents of `create_agent`."""

import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, model = sys.argv[1:]
MODELS: list[BaseChatModel] = [
    ChatOpenAI(base_url=f"{url}/v1", model=model, api_key="none", max_retries=0),
    ChatOpenAI(base_url=f"{url}/v1", model=model, api_key="none", max_retries=0, use_responses_api=True),
    ChatAnthropic(base_url=url, model=model, api_key="none", max_retries=0),
    ChatOllama(base_url=url, model=model),
]


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


QUESTION = "What is the weather in Paris?"
REPORT = Report(city="Paris", celsius=21)
question = {"messages": [{"role": "user", "content": QUESTION}]}

for chat in MODELS:
    # A message, and the same as a stream.
    answer = chat.invoke(QUESTION)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == answer.text

    # A call of a tool, whether or not the model may choose.
    for choice in ("auto", "any"):
        (call,) = chat.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION).tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})

    # A parsed answer, by a schema and by a tool.
    for method in ("json_schema", "function_calling"):
        assert chat.with_structured_output(Report, method=method).invoke(QUESTION) == REPORT

    # Agents: plain, with a schema, and with a tool that reports.
    for form in (None, ProviderStrategy(Report), ToolStrategy(Report)):
        calls.clear()
        state = create_agent(chat, [get_weather], response_format=form).invoke(question)
        assert calls == ["Paris"]
        if form is None:
            assert state["messages"][-1].text == answer.text
        else:
            assert state["structured_response"] == REPORT

for embeddings in (
    OpenAIEmbeddings(base_url=f"{url}/v1", model=model, api_key="none", check_embedding_ctx_length=False),
    OllamaEmbeddings(base_url=url, model=model),
):
    one, two = embeddings.embed_documents(["Paris", "The capital of Italy"])
    assert len(one) == len(two) == len(embeddings.embed_query("Paris")) > 0
