"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._engine.request import Reports
from ferrule._engine.workers import WORKERS, workers_for
from ferrule._text.prompt import TokensPrompt
from ferrule.errors import InvalidParameterError
from ferrule.server.ascii_json import encoded, json_response
from ferrule.server.context import Context
from ferrule.server.conversation import prepare_prompt
from ferrule.server.errors import unsupported
from ferrule.server.generation import Generation, complete, new_request_id, prompt_ids
from ferrule.server.models import ServedModel
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.responses.answer import ResponseWriter
from ferrule.server.responses.background import BackgroundResponses
from ferrule.server.responses.history import continued
from ferrule.server.responses.items import conversation
from ferrule.server.responses.protocol import LOGPROBS, InputTokens, ResponseBody, ResponsesRequest
from ferrule.server.responses.store import StoredResponse
from ferrule.server.schema.sampling import sampling_params
from ferrule.server.streaming import EventStream


def router(server: Context, background: BackgroundResponses | None) -> APIRouter:
    """Creates the route; `background` has the store of responses, without which nothing is stored."""
    routes = APIRouter(route_class=BodyRoute)

    async def complete_input(request: ResponsesRequest) -> tuple[ResponsesRequest, bytes]:
        """Returns a valid request with the whole conversation as input, and the items to store."""
        _check(request)
        name_fields(_names(request))
        if background is None:
            _check_stateless(request)
        elif request.store or request.previous_response_id is not None:
            return await workers_for().run(continued, background.store, request)
        return request, b""

    @routes.post("/responses/input_tokens", response_model=InputTokens, include_in_schema=False)
    @routes.post("/v1/responses/input_tokens", response_model=InputTokens)
    async def input_tokens(request: ResponsesRequest) -> InputTokens:
        """Counts the tokens of the prompt that a request would have (OpenAI's input_tokens)."""
        request, _ = await complete_input(request.model_copy(update={"store": False}))
        prepared = await prepare_prompt(await server.lease(request.model), server.settings, conversation(request))
        return InputTokens(input_tokens=len(prompt_ids(prepared.prompt)))

    @routes.post("/responses", response_model=ResponseBody, include_in_schema=False)
    @routes.post("/v1/responses", response_model=ResponseBody)
    async def responses(request: ResponsesRequest) -> Response:
        """Answers a conversation (OpenAI's Responses), whole or as a stream of typed events."""
        store = request.store is not False and background is not None
        request, items = await complete_input(request.model_copy(update={"store": store}))
        writer = ResponseWriter(request, await generation(server, await server.lease(request.model), request))
        if background is not None and request.background:
            if not store:
                raise InvalidParameterError("store", False, "left out or true with background")
            started = await background.start(writer, items)
            if request.stream:
                return EventStream(started.follow(0), server.settings.keep_alive)
            return json_response(writer.progress())

        async def save(body: ResponseBody) -> None:
            if background is not None and store:
                await WORKERS.run(background.store.put, body.id, StoredResponse(encoded(body), items), ended=True)

        if request.stream:
            return await EventStream(_saved(writer, save), server.settings.keep_alive, writer.failed).begin()
        body = writer.full(await complete(writer.generation))
        await save(body)
        return json_response(body)

    return routes


async def _saved(
    writer: ResponseWriter, save: Callable[[ResponseBody], Awaitable[None]]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream; the response is saved before the client sees the last one."""
    async with aclosing(writer.events()) as events:
        async for event in events:
            if writer.ended is not None:
                await save(writer.ended)
            yield event


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
        reports=Reports(prompt_progress=bool(request.stream and request.return_progress)),
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


def _check_stateless(request: ResponsesRequest) -> None:
    """Raises ApiError for a request that needs the store, which is disabled."""
    if request.previous_response_id is not None:
        hint = "start the server with --responses-db, or send the conversation as input"
        raise unsupported("previous_response_id", f"previous_response_id is not supported without storage: {hint}")
    if request.background:
        hint = "start the server with --responses-db"
        raise unsupported("background", f"background is not supported without storage: {hint}")


def _logprobs(request: ResponsesRequest) -> int | None:
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise InvalidParameterError("top_logprobs", request.top_logprobs, f"left out unless include has {LOGPROBS}")
    return None
