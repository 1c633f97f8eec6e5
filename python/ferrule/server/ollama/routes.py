"""Routes below /api, which the setting `ollama` enables."""

from __future__ import annotations

import time
from typing import Any, cast

from fastapi import APIRouter
from starlette.responses import Response

from ferrule.server.ascii_json import json_response
from ferrule.server.context import Context
from ferrule.server.encoding import (
    before_deadline,
    check_not_adapter,
    check_texts,
    input_field_names,
    record_input_tokens,
)
from ferrule.server.errors import ApiError
from ferrule.server.generation import Generation, complete
from ferrule.server.ollama.answer import NANOSECONDS, ResponseWriter, load_response
from ferrule.server.ollama.errors import error_body
from ferrule.server.ollama.model_info import running, show, tag
from ferrule.server.ollama.protocol import (
    ChatRequest,
    ChatResponse,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
    GenerationLine,
    GenerationRequest,
    ModelTags,
    RunningModels,
    ShowRequest,
    ShowResponse,
    Version,
)
from ferrule.server.ollama.requests import chat, check_embed_options, find, generate, lease
from ferrule.server.request_body import AnyTypeBodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.schema.duration import seconds
from ferrule.server.streaming import LineStream, line

API_VERSION = "0.13.0"
"""Version of Ollama whose requests the routes read; clients require a minimum version."""


def router(server: Context) -> APIRouter:
    """Creates the routes; none unless the setting `ollama` is true."""
    responses: dict[int | str, dict[str, Any]] = {"default": {"model": dict[str, str], "description": "Error"}}
    routes = APIRouter(route_class=AnyTypeBodyRoute, prefix="/api", responses=responses)
    if not server.settings.ollama:
        return routes

    @routes.post("/chat", response_model=ChatResponse)
    async def api_chat(request: ChatRequest) -> Response:
        """Answers a conversation, as lines of JSON or, with `stream` false, whole."""
        if not request.messages:
            return json_response(await _load(server, request, chat=True))
        served = await lease(server, request.model, request.keep_alive)
        return await _answer(await chat(server, served, request), request, chat=True)

    @routes.post("/generate", response_model=GenerateResponse)
    async def api_generate(request: GenerateRequest) -> Response:
        """Answers a prompt, or continues a raw one."""
        if not (request.prompt or request.suffix):
            return json_response(await _load(server, request, chat=False))
        served = await lease(server, request.model, request.keep_alive)
        return await _answer(await generate(server, served, request), request, chat=False)

    @routes.post("/embed", response_model=EmbedResponse)
    async def api_embed(request: EmbedRequest) -> Response:
        """Embeds texts as vectors of length 1."""
        begun = time.perf_counter()
        served = check_not_adapter(await lease(server, request.model, request.keep_alive))
        check_embed_options(request.options)
        texts = [request.input] if isinstance(request.input, str) else request.input
        check_texts(texts)
        name_fields(input_field_names(several=len(texts) > 1))
        outputs = await before_deadline(
            served.llm.embed(
                texts,
                normalize=True,
                dimensions=request.dimensions,
                truncate_prompt_tokens=None if request.truncate is False else -1,
            )
        )
        tokens = [len(output.prompt_token_ids) for output in outputs]
        record_input_tokens(tokens)
        body = EmbedResponse(
            model=served.name,
            embeddings=[cast("list[float]", output.outputs.embedding.tolist()) for output in outputs],
            total_duration=int((time.perf_counter() - begun) * NANOSECONDS),
            load_duration=0,
            prompt_eval_count=sum(tokens),
        )
        return json_response(body)

    @routes.post("/embeddings", response_model=EmbeddingsResponse)
    async def api_embeddings(request: EmbeddingsRequest) -> Response:
        """Embeds a text (the older form of /api/embed); the vector is not normalized."""
        served = check_not_adapter(await lease(server, request.model, request.keep_alive))
        check_embed_options(request.options)
        name_fields({"prompts[0]": "prompt"})
        found: list[float] = []
        if request.prompt:
            (output,) = await before_deadline(
                served.llm.embed([request.prompt], normalize=False, truncate_prompt_tokens=-1)
            )
            record_input_tokens([len(output.prompt_token_ids)])
            found = cast("list[float]", output.outputs.embedding.tolist())
        return json_response(EmbeddingsResponse(embedding=found))

    @routes.get("/tags")
    async def api_tags() -> ModelTags:
        """Lists the models."""
        await server.models.check_health()
        return ModelTags(models=[tag(each, server.models.created) for each in server.models.all()])

    @routes.get("/ps")
    async def api_ps() -> RunningModels:
        """Lists the loaded models."""
        await server.models.check_health()
        loaded = [each for each in server.models.all() if each.entry.state == "loaded"]
        return RunningModels(models=[running(each, server.models.created) for each in loaded])

    @routes.post("/show")
    async def api_show(request: ShowRequest) -> ShowResponse:
        """Describes a model, which is loaded for it."""
        return show(await lease(server, request.model), server.settings, server.models.created)

    @routes.get("/version")
    async def api_version() -> Version:
        """Returns the version of Ollama's API that the routes follow; GET /version has ferrule's."""
        return Version(version=API_VERSION)

    return routes


async def _load(server: Context, request: GenerationRequest, *, chat: bool) -> GenerationLine:
    """Loads a model for a request without a prompt, or unloads it if its `keep_alive` is 0."""
    found = find(server, request.model)
    keep_alive = None if request.keep_alive is None else seconds(request.keep_alive)
    if keep_alive == 0 and not found.entry.stays_loaded:
        await server.models.residency.unload(found.entry)
        return load_response(found.name, "unload", chat=chat)
    await server.lease(found.name, keep_alive)
    return load_response(found.name, "load", chat=chat)


async def _answer(generation: Generation, request: GenerationRequest, *, chat: bool) -> Response:
    writer = ResponseWriter(generation, chat, request.top_logprobs)
    if request.stream is False:
        return json_response(writer.full(await complete(generation)))
    # A stream of JSON lines has no comments that could keep the connection alive.
    return await LineStream(writer.lines(), 0, _failed).begin()


def _failed(error: ApiError) -> bytes:
    return line(error_body(error))
