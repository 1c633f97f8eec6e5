"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._params.sampling import SamplingParams
from ferrule.server.anthropic.answer import PING, ResponseWriter, failed
from ferrule.server.anthropic.conversation import check_thinking, conversation
from ferrule.server.anthropic.protocol import CountTokensRequest, ErrorBody, Message, MessagesRequest, TokenCount
from ferrule.server.ascii_json import json_response
from ferrule.server.context import Context
from ferrule.server.conversation import check_reasoning_supported, prepare_prompt
from ferrule.server.generation import Generation, complete, new_request_id, prompt_ids
from ferrule.server.models import ServedModel
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.streaming import EventStream


def router(server: Context) -> APIRouter:
    """Creates the routes. The header anthropic-version is ignored: there is one version."""
    routes = APIRouter(route_class=BodyRoute, responses={"default": {"model": ErrorBody, "description": "Error"}})

    @routes.post("/v1/messages", response_model=Message)
    async def messages(request: MessagesRequest) -> Response:
        """Answers a conversation (Anthropic's Messages), whole or as a stream of typed events."""
        name_fields(_names(request))
        writer = ResponseWriter(await generation(server, await server.lease(request.model), request))
        if request.stream:
            stream = EventStream(writer.events(), server.settings.keep_alive, failed, comment=PING)
            return await stream.begin()
        return json_response(writer.full(await complete(writer.generation)))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: CountTokensRequest) -> TokenCount:
        """Counts the tokens of a conversation."""
        name_fields(_names(request))
        prepared = await prepare_prompt(await server.lease(request.model), server.settings, conversation(request))
        return TokenCount(input_tokens=len(prompt_ids(prepared.prompt)))

    return routes


async def generation(server: Context, served: ServedModel, request: MessagesRequest) -> Generation:
    """Converts a request to a generation.

    Raises ApiError, FerruleError.
    """
    check_thinking(request)
    if request.thinking is not None and request.thinking.type == "enabled":
        check_reasoning_supported("thinking", served, server.settings)
    given = conversation(request)
    prepared = await prepare_prompt(served, server.settings, given)
    params = SamplingParams.with_model_defaults(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences or (),
        structured_outputs=prepared.structure,
    )
    return Generation(
        served,
        prepared.prompt,
        params,
        new_request_id("msg").replace("-", "_"),
        prepared.message_format,
        parallel_tool_calls=given.parallel_tool_calls,
        only_calls=prepared.only_calls,
    )


def _names(request: CountTokensRequest) -> dict[str, str]:
    """Returns the request's names of the library's fields."""
    return {
        "stop": "stop_sequences",
        "structured_outputs.json": "tools" if request.tools else "output_config.format.schema",
        "structured_outputs.grammar": "tools",
        "tool_choice.function.name": "tool_choice.name",
    }
