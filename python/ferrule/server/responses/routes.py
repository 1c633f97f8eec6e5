"""POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._text.prompt import TokensPrompt
from ferrule.errors import InvalidParameterError
from ferrule.server.ascii_json import json_response
from ferrule.server.context import Context
from ferrule.server.conversation import prepare_prompt
from ferrule.server.errors import unsupported
from ferrule.server.generation import Generation, complete, new_request_id
from ferrule.server.models import ServedModel
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.responses.answer import ResponseWriter
from ferrule.server.responses.items import conversation
from ferrule.server.responses.protocol import LOGPROBS, ResponseBody, ResponsesRequest
from ferrule.server.schema.sampling import sampling_params
from ferrule.server.streaming import EventStream


def router(server: Context) -> APIRouter:
    """Creates the route."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/responses", response_model=ResponseBody, include_in_schema=False)
    @routes.post("/v1/responses", response_model=ResponseBody)
    async def responses(request: ResponsesRequest) -> Response:
        """Answers a conversation (OpenAI's Responses), whole or as a stream of typed events. Nothing is stored."""
        _check(request)
        name_fields(_names(request))
        writer = ResponseWriter(request, await generation(server, server.models.find(request.model), request))
        if request.stream:
            return await EventStream(writer.events(), server.settings.keep_alive, writer.failed).begin()
        return json_response(writer.full(await complete(writer.generation)))

    return routes


async def generation(server: Context, served: ServedModel, request: ResponsesRequest) -> Generation:
    """Converts a request to a generation.

    Raises ApiError, FerruleError.
    """
    prepared = await prepare_prompt(served, server.settings, conversation(request))
    logprobs = _logprobs(request)
    if logprobs is not None and prepared.message_format is not None:
        raise unsupported("include", f"include: {LOGPROBS} is not supported for outputs with reasoning or tool calls")
    params = sampling_params(
        request, max_tokens=request.max_output_tokens, logprobs=logprobs, structure=prepared.structure
    )
    prompt: TokensPrompt = prepared.prompt
    if request.cache_salt is not None:
        prompt = {**prompt, "cache_salt": request.cache_salt}
    return Generation(
        served,
        prompt,
        params,
        new_request_id("resp").replace("-", "_"),
        prepared.message_format,
        request.priority,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        only_calls=prepared.only_calls,
    )


def _names(request: ResponsesRequest) -> dict[str, str]:
    """Returns the request's names of the library's fields."""
    names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
    if request.structured_outputs is None:
        names["structured_outputs.json"] = "tools" if request.tools else "text.format.schema"
        names["structured_outputs.grammar"] = "tools"
    return {**names, "tool_choice.function.name": "tool_choice.name", "prompt": "input", "messages": "input"}


def _check(request: ResponsesRequest) -> None:
    """Raises ApiError, InvalidParameterError for unsupported values and combinations."""
    if request.n not in (None, 1):
        raise unsupported("n", "n must be 1: a response has one answer")
    if request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "prompt_logprobs is not supported; use /v1/completions")
    if request.stream_options is not None and not request.stream:
        raise InvalidParameterError(
            "stream_options", request.stream_options.model_dump(), "left out unless stream is true"
        )


def _logprobs(request: ResponsesRequest) -> int | None:
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise InvalidParameterError("top_logprobs", request.top_logprobs, f"left out unless include has {LOGPROBS}")
    return None
