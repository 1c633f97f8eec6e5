"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._params.sampling import SamplingParams
from ferrule.server.anthropic.answer import PING, Answer, failed
from ferrule.server.anthropic.conversation import check_thinking, conversation
from ferrule.server.anthropic.protocol import CountTokensRequest, ErrorBody, Message, MessagesRequest, TokenCount
from ferrule.server.ascii_json import json_response
from ferrule.server.context import Context
from ferrule.server.conversation import check_reasons, prepare
from ferrule.server.errors import call_fields
from ferrule.server.generation import Generation, complete, prompt_ids
from ferrule.server.models import Served
from ferrule.server.openai.shapes import new_id
from ferrule.server.reading import BodyRoute
from ferrule.server.streaming import EventStream


def router(server: Context) -> APIRouter:
    """The routes. The header anthropic-version is not looked at: there is one version."""
    routes = APIRouter(
        route_class=BodyRoute, responses={"default": {"model": ErrorBody, "description": "What went wrong"}}
    )

    @routes.post("/v1/messages", response_model=Message)
    async def messages(asked: MessagesRequest) -> Response:
        """Answers a conversation: Anthropic's Messages, at once or as a stream of typed events."""
        call_fields(_names(asked))
        answer = Answer(await generation(server, server.models.find(asked.model), asked))
        if asked.stream:
            stream = EventStream(answer.events(), server.settings.keep_alive, failed, comment=PING)
            return await stream.begin()
        return json_response(answer.whole(await complete(answer.generation)))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(asked: CountTokensRequest) -> TokenCount:
        """The tokens that a conversation would be."""
        call_fields(_names(asked))
        prepared = await prepare(server.models.find(asked.model), server.settings, conversation(asked))
        return TokenCount(input_tokens=len(prompt_ids(prepared.prompt)))

    return routes


async def generation(server: Context, served: Served, asked: MessagesRequest) -> Generation:
    """What is asked of the model.

    Raises ApiError, FerruleError.
    """
    check_thinking(asked)
    if asked.thinking is not None and asked.thinking.type == "enabled":
        check_reasons("thinking", served, server.settings)
    told = conversation(asked)
    prepared = await prepare(served, server.settings, told)
    params = SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences or (),
        structured_outputs=prepared.structure,
    )
    return Generation(
        served,
        prepared.prompt,
        params,
        new_id("msg").replace("-", "_"),
        prepared.message_format,
        parallel_tool_calls=told.parallel_tool_calls,
        only_calls=prepared.only_calls,
    )


def _names(asked: CountTokensRequest) -> dict[str, str]:
    """What the request calls the library's fields."""
    return {
        "stop": "stop_sequences",
        "structured_outputs.json": "tools" if asked.tools else "output_config.format.schema",
        "tool_choice.function.name": "tool_choice.name",
    }
