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
from ferrule.server.responses.answer import Answer
from ferrule.server.responses.items import conversation
from ferrule.server.responses.protocol import LOGPROBS, ResponseBody, ResponsesRequest
from ferrule.server.schema.sampling import sampling_params
from ferrule.server.streaming import EventStream


def router(server: Context) -> APIRouter:
    """The route."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/responses", response_model=ResponseBody)
    async def responses(request: ResponsesRequest) -> Response:
        """Answers a conversation: OpenAI's Responses, at once or as a stream of typed events. Nothing is stored."""
        _check(request)
        name_fields(_names(request))
        answer = Answer(request, await generation(server, server.models.find(request.model), request))
        if request.stream:
            return await EventStream(answer.events(), server.settings.keep_alive, answer.failed).begin()
        return json_response(answer.whole(await complete(answer.generation)))

    return routes


async def generation(server: Context, served: ServedModel, request: ResponsesRequest) -> Generation:
    """What is asked of the model.

    Raises ApiError, FerruleError.
    """
    prepared = await prepare_prompt(served, server.settings, conversation(request))
    logprobs = _logprobs(request)
    if logprobs is not None and prepared.message_format is not None:
        raise unsupported("include", f"{LOGPROBS} is asked for, but the output has reasoning or calls beside its text")
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
    """What the request calls the library's fields."""
    names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
    if request.structured_outputs is None:
        names["structured_outputs.json"] = "tools" if request.tools else "text.format.schema"
    return {**names, "tool_choice.function.name": "tool_choice.name", "prompt": "input", "messages": "input"}


def _check(request: ResponsesRequest) -> None:
    """Raises ApiError for what a server without a memory has not, InvalidParameterError for what does not fit."""
    if request.store:
        raise unsupported("store", "store is true, but the server stores nothing; hand the output back as input")
    if request.previous_response_id is not None:
        raise unsupported("previous_response_id", "previous_response_id is given, but the server stores no responses")
    if request.background:
        raise unsupported("background", "background is true; responses are for whoever waits for them")
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation", "truncation is not disabled; a conversation that is too long is an error")
    if request.n not in (None, 1):
        raise unsupported("n", "n is not 1; a response is one answer")
    if request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "prompt_logprobs are asked for; a response says nothing of its prompt")
    if request.stream_options is not None and not request.stream:
        raise InvalidParameterError("stream_options is given, but stream is not true")
    if request.stream_options is not None and request.stream_options.continuous_usage_stats:
        raise unsupported(
            "stream_options", "stream_options.continuous_usage_stats is true; the last event has the usage"
        )
    if request.stream_options is not None and request.stream_options.include_usage:
        raise unsupported("stream_options", "stream_options.include_usage is true; the last event has it anyway")


def _logprobs(request: ResponsesRequest) -> int | None:
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise InvalidParameterError(f"top_logprobs is given, but include does not have {LOGPROBS}")
    return None
