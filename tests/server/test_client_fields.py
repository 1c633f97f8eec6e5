"""Every request parameter of the official clients is supported, accepted without effect, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ollama
import pytest
from anthropic.resources import Messages
from anthropic.resources.beta import Messages as BetaMessages
from openai.resources import Embeddings
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from ferrule.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from ferrule.server.errors import ApiError
from ferrule.server.ollama.protocol import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Options
from ferrule.server.openai.protocol.chat import ChatCompletionRequest
from ferrule.server.openai.protocol.completions import CompletionRequest
from ferrule.server.openai.protocol.pooling import EmbeddingRequest
from ferrule.server.responses.protocol import ResponsesRequest
from ferrule.server.schema.base import Accepted, RequestModel, Unsupported, check_other_fields

NOT_IN_BODIES = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "betas"}
"""Parameters of client methods that are not fields of the request body; `betas` is a header."""
METHODS: list[tuple[Callable[..., Any], type[RequestModel]]] = [
    (ChatCompletions.create, ChatCompletionRequest),
    (Completions.create, CompletionRequest),
    (Embeddings.create, EmbeddingRequest),
    (Responses.create, ResponsesRequest),
    (Messages.create, MessagesRequest),
    (Messages.count_tokens, CountTokensRequest),
    (BetaMessages.create, MessagesRequest),
    (BetaMessages.count_tokens, CountTokensRequest),
    (ollama.Client.chat, ChatRequest),
    (ollama.Client.generate, GenerateRequest),
    (ollama.Client.embed, EmbedRequest),
    (ollama.Client.embeddings, EmbeddingsRequest),
]
REGISTERED = [ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, MessagesRequest, Options]


def known_fields(model: type[RequestModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()} | set(model.other_fields)


@pytest.mark.parametrize(("method", "model"), METHODS, ids=lambda each: each.__qualname__)
def test_client_method_parameters_are_all_known(method: Callable[..., Any], model: type[RequestModel]) -> None:
    parameters = set(inspect.signature(method).parameters) - NOT_IN_BODIES
    assert len(parameters) > 3
    assert parameters - known_fields(model) == set()


def test_ollama_options_are_all_known() -> None:
    assert set(ollama.Options.model_fields) - known_fields(Options) == set()


@pytest.mark.parametrize("model", REGISTERED)
def test_declared_fields_have_no_other_field_rule(model: type[RequestModel]) -> None:
    assert model.other_fields.keys() & model.model_fields.keys() == set()


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model in REGISTERED for name in model.other_fields], ids=str
)
def test_other_field_rules_are_applied(model: type[RequestModel], name: str) -> None:
    rule = model.other_fields[name]
    body = model.model_construct(**dict.fromkeys(model.model_fields))
    for value in rule.neutral if isinstance(rule, Unsupported) else ("anything",):
        body.__pydantic_extra__ = {name: value}
        assert check_other_fields(body) == []
        assert body.__pydantic_extra__ == {}
    if not isinstance(rule, Accepted):
        body.__pydantic_extra__ = {name: "anything"}
        with pytest.raises(ApiError) as caught:
            check_other_fields(body)
        assert caught.value.detail.startswith(f"{name} is not supported: ")
        assert (caught.value.status_code, caught.value.param) == (400, name)
