"""POST /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.responses import Response

from ferrule._text.prompt import TokensPrompt
from ferrule.errors import InvalidParameterError
from ferrule.server.context import Context
from ferrule.server.encoding import (
    before_deadline,
    check_not_adapter,
    check_texts,
    input_field_names,
    record_input_tokens,
)
from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.generation import new_request_id
from ferrule.server.openai.protocol.pooling import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    RerankList,
    RerankRequest,
    RerankResult,
    TextRank,
    TextRanks,
)
from ferrule.server.openai.protocol.usage import Usage
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/embeddings", response_model=EmbeddingList, include_in_schema=False)
    @routes.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(request: EmbeddingRequest) -> Response:
        """Embeds texts (OpenAI's embeddings), with an embedding model or with the hidden states of any other."""
        served = check_not_adapter(await server.lease(request.model))
        texts = texts_of(request.input)
        name_fields(input_field_names(several=len(texts) > 1))
        outputs = await before_deadline(
            served.llm.embed(
                texts,
                normalize=request.normalize,
                dimensions=request.dimensions,
                truncate_prompt_tokens=request.truncate_prompt_tokens,
            )
        )
        tokens = [len(output.prompt_token_ids) for output in outputs]
        record_input_tokens(tokens)
        body = EmbeddingList(
            model=served.name,
            data=[
                Embedding(index=index, embedding=encoded_vector(output.outputs.embedding, request.encoding_format))
                for index, output in enumerate(outputs)
            ],
            usage=tokens_usage(sum(tokens)),
        )
        return Response(body.model_dump_json(), media_type="application/json")

    # Paths of Jina's and Cohere's clients, as in vLLM, and of llama.cpp's.
    @routes.post("/rerank", response_model=RerankList | TextRanks)
    @routes.post("/reranking", response_model=RerankList | TextRanks, include_in_schema=False)
    @routes.post("/v1/reranking", response_model=RerankList | TextRanks, include_in_schema=False)
    @routes.post("/v2/rerank", response_model=RerankList | TextRanks)
    @routes.post("/v1/rerank", response_model=RerankList | TextRanks)
    async def rerank(request: RerankRequest) -> Response:
        """Sorts documents by their relevance to a query, the best first (Jina's and Cohere's rerank, or TEI's)."""
        served = check_not_adapter(await server.lease(request.model))
        documents = _documents(request)
        ranked = await before_deadline(
            served.llm.rerank(
                request.query,
                documents,
                top_n=request.top_n,
                instruction=request.instruction,
                truncate_prompt_tokens=-1 if request.truncate else request.truncate_prompt_tokens,
            )
        )
        read = ranked[0].prompt_tokens
        record_input_tokens([read])
        if request.texts is not None:
            ranks = [
                TextRank(
                    index=each.index,
                    score=each.relevance_score,
                    text=each.document if request.return_text else None,
                )
                for each in ranked
            ]
            return Response(TextRanks(ranks).model_dump_json(), media_type="application/json")
        results = [
            RerankResult(
                index=each.index,
                relevance_score=each.relevance_score,
                document={"text": each.document} if request.return_documents else None,
            )
            for each in ranked
        ]
        body = RerankList(id=new_request_id("rerank"), model=served.name, results=results, usage=tokens_usage(read))
        return Response(body.model_dump_json(), media_type="application/json")

    return routes


def _documents(request: RerankRequest) -> list[str]:
    """Returns the documents of a request.

    Raises ApiError, InvalidParameterError.
    """
    if request.texts is not None:
        if request.documents is not None:
            raise InvalidParameterError("texts", request.texts, "left out with documents; both mean the same")
        name_fields({"documents": "texts"})
        return request.texts
    if request.documents is None:
        raise ApiError(BAD_REQUEST, "documents is required", code="missing_required_parameter", param="documents")
    return [each if isinstance(each, str) else each.text for each in request.documents]


def tokens_usage(read: int) -> Usage:
    """Returns the usage of a request without output."""
    return Usage(prompt_tokens=read, completion_tokens=0, total_tokens=read)


def texts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[str | TokensPrompt]:
    """Returns the texts of a request.

    Raises InvalidParameterError.
    """
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    texts = cast("Sequence[str | list[int]]", given if several else [given])
    check_texts(texts)
    return [each if isinstance(each, str) else {"prompt_token_ids": each} for each in texts]


def encoded_vector(vector: npt.NDArray[np.float32], encoding: str | None) -> Any:
    """Returns a vector or a matrix as lists of numbers, or as base64."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
