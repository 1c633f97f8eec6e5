"""POST /completion, /infill and /embedding, and GET /props."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ferrule import __version__
from ferrule._params.sampling import SamplingParams
from ferrule.errors import InvalidParameterError
from ferrule.server.ascii_json import encoded
from ferrule.server.context import Context
from ferrule.server.encoding import before_deadline, check_not_adapter, check_texts, record_input_tokens
from ferrule.server.errors import ApiError
from ferrule.server.generation import Generation
from ferrule.server.llama_cpp.answer import ResponseWriter
from ferrule.server.llama_cpp.errors import error_body
from ferrule.server.llama_cpp.protocol import (
    CompletionResult,
    DefaultSettings,
    InfillRequest,
    NativeCompletionRequest,
    NativeEmbedding,
    NativeEmbeddingRequest,
    NativeFields,
    Props,
)
from ferrule.server.llama_cpp.requests import completions, infill, read_prompts, settings
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.streaming import EventStream

NORMS = {2: True, -1: False}
"""Whether vectors are normalized, by the number of the norm."""


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/completion", response_model=CompletionResult | list[CompletionResult])
    async def completion(request: NativeCompletionRequest) -> Response:
        """Continues a prompt, or a list of prompts (llama.cpp's completion)."""
        return await _answer(server, request, await completions(await server.lease(request.model), request))

    @routes.post("/infill", response_model=CompletionResult)
    async def fill_in(request: InfillRequest) -> Response:
        """Writes the text between a prefix and a suffix (llama.cpp's infill)."""
        return await _answer(server, request, await infill(await server.lease(request.model), request))

    @routes.post("/embedding")
    async def embedding(request: NativeEmbeddingRequest) -> list[NativeEmbedding]:
        """Embeds a text or a list of texts (llama.cpp's embedding)."""
        served = check_not_adapter(await server.lease(request.model))
        name_fields(dict.fromkeys(("prompts", "prompt_token_ids", "prompt", "input"), "content"))
        if request.embd_normalize not in NORMS:
            raise InvalidParameterError("embd_normalize", request.embd_normalize, "2 (Euclidean) or -1 (none)")
        texts = await read_prompts(served, "content", request.content)
        check_texts(texts)
        outputs = await before_deadline(served.llm.embed(cast("Any", texts), normalize=NORMS[request.embd_normalize]))
        record_input_tokens([len(output.prompt_token_ids) for output in outputs])
        return [
            NativeEmbedding(index=index, embedding=[output.outputs.embedding.tolist()])
            for index, output in enumerate(outputs)
        ]

    @routes.get("/props")
    async def props(model: str | None = None) -> Props:
        """Describes a model and the default parameters of requests, without loading it."""
        found = server.models.find(model)
        llm = found.entry.llm
        described = Props(
            model_alias=found.name,
            model_path=found.entry.source,
            modalities={"vision": False, "audio": False},
            build_info=f"ferrule-{__version__}",
            is_sleeping=llm is None,
        )
        if llm is None:
            return described
        tokenizer, served = llm.get_tokenizer(), server.models.served(found, llm)
        params = settings(SamplingParams.with_model_defaults(), served)
        return described.model_copy(
            update={
                "default_generation_settings": DefaultSettings(n_ctx=served.info["max_model_len"], params=params),
                "total_slots": served.info["max_num_seqs"],
                "chat_template": server.settings.chat_template or tokenizer.chat_template or "",
                "bos_token": tokenizer.bos_token or "",
                "eos_token": tokenizer.eos_token or "",
            }
        )

    return routes


async def _answer(server: Context, request: NativeFields, generations: list[Generation]) -> Response:
    writer = ResponseWriter(request, generations)
    if request.stream:
        return await EventStream(writer.events(), server.settings.keep_alive, _failed).begin()
    return JSONResponse(await writer.full())


def _failed(error: ApiError) -> bytes:
    return b"data: " + encoded(error_body(error)) + b"\n\n"
