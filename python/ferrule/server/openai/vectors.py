"""POST /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.responses import Response

from ferrule._text.prompt import TokensPrompt
from ferrule.server.context import Context
from ferrule.server.encoding import check_encodes, check_texts, in_time, input_names, note_read
from ferrule.server.errors import call_fields
from ferrule.server.openai.protocol import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    RerankList,
    RerankRequest,
    RerankResult,
    Usage,
)
from ferrule.server.openai.shapes import new_id
from ferrule.server.reading import BodyRoute


def router(server: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(asked: EmbeddingRequest) -> Response:
        """Texts as vectors: OpenAI's embeddings, of models made for that, and of any other's hidden states."""
        served = check_encodes(server.models.find(asked.model))
        texts = _texts(asked.input)
        call_fields(input_names(several=len(texts) > 1))
        outputs = await in_time(
            served.llm.embed(
                texts,
                normalize=asked.normalize,
                dimensions=asked.dimensions,
                truncate_prompt_tokens=asked.truncate_prompt_tokens,
            )
        )
        tokens = [len(output.prompt_token_ids) for output in outputs]
        note_read(tokens)
        body = EmbeddingList(
            model=served.name,
            data=[
                Embedding(index=index, embedding=_written(output.embedding, asked.encoding_format))
                for index, output in enumerate(outputs)
            ],
            usage=_usage(sum(tokens)),
        )
        return Response(body.model_dump_json(), media_type="application/json")

    # As Jina's and Cohere's clients spell it, and vLLM answers.
    @routes.post("/rerank", response_model=RerankList)
    @routes.post("/v2/rerank", response_model=RerankList)
    @routes.post("/v1/rerank", response_model=RerankList)
    async def rerank(asked: RerankRequest) -> Response:
        """Documents by how well they answer a query, the best first: Jina's and Cohere's rerank."""
        served = check_encodes(server.models.find(asked.model))
        ranked = await in_time(
            served.llm.rerank(
                asked.query,
                [each if isinstance(each, str) else each.text for each in asked.documents],
                top_n=asked.top_n,
                instruction=asked.instruction,
                truncate_prompt_tokens=asked.truncate_prompt_tokens,
            )
        )
        read = ranked[0].prompt_tokens if ranked else 0
        note_read([read])
        results = [
            RerankResult(
                index=each.index,
                relevance_score=each.relevance_score,
                document={"text": each.document} if asked.return_documents else None,
            )
            for each in ranked
        ]
        body = RerankList(id=new_id("rerank"), model=served.name, results=results, usage=_usage(read))
        return Response(body.model_dump_json(), media_type="application/json")

    return routes


def _usage(read: int) -> Usage:
    return Usage(prompt_tokens=read, completion_tokens=0, total_tokens=read)


def _texts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | TokensPrompt]:
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    texts = cast("Sequence[str | list[int]]", given if several else [given])
    check_texts(texts)
    return [each if isinstance(each, str) else {"prompt_token_ids": each} for each in texts]


def _written(vector: npt.NDArray[np.float32], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return cast("list[float]", vector.tolist())
