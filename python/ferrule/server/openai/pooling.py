"""POST /classify, /pooling and /score (vLLM's routes)."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.responses import Response

from ferrule.errors import InvalidParameterError, UnsupportedTaskError
from ferrule.server.context import Context
from ferrule.server.encoding import before_deadline, check_not_adapter, input_field_names, record_input_tokens
from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.generation import new_request_id
from ferrule.server.models import ServedModel
from ferrule.server.openai.embeddings import encoded_vector, texts_of, tokens_usage
from ferrule.server.openai.protocol.pooling import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    Pooled,
    PoolingList,
    PoolingRequest,
    Score,
    ScoreList,
    ScoreRequest,
)
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.schema.base import one_of

Vector = npt.NDArray[np.float32]
EMBED, CLASSIFY = "embed", "classify"
FIRST, SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")
"""Names of the two sides of a score."""


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/classify", response_model=ClassificationList)
    async def classify(request: ClassifyRequest) -> Response:
        """Computes the probabilities that a classifier assigns to its labels."""
        served = check_not_adapter(await server.lease(request.model))
        texts = texts_of(request.input)
        name_fields(input_field_names(several=len(texts) > 1))
        outputs = await before_deadline(
            served.llm.classify(cast("Any", texts), truncate_prompt_tokens=request.truncate_prompt_tokens)
        )
        tokens = [len(output.prompt_token_ids) for output in outputs]
        record_input_tokens(tokens)
        body = ClassificationList(
            id=new_request_id("classify"),
            created=int(time.time()),
            model=served.name,
            data=[
                Classification(
                    index=index,
                    label=output.outputs.label,
                    probs=output.outputs.probs.tolist(),
                    num_classes=output.outputs.num_classes,
                )
                for index, output in enumerate(outputs)
            ],
            usage=tokens_usage(sum(tokens)),
        )
        return Response(body.model_dump_json(), media_type="application/json")

    @routes.post("/pooling", response_model=PoolingList)
    async def pooling(request: PoolingRequest) -> Response:
        """Computes what a model makes of texts: vectors of texts or tokens, or probabilities."""
        served = check_not_adapter(await server.lease(request.model))
        found = await before_deadline(_pool(served, request))
        tokens = [read for read, _ in found]
        record_input_tokens(tokens)
        body = PoolingList(
            id=new_request_id("pool"),
            created=int(time.time()),
            model=served.name,
            data=[
                Pooled(index=index, data=encoded_vector(values, request.encoding_format))
                for index, (_, values) in enumerate(found)
            ],
            usage=tokens_usage(sum(tokens)),
        )
        return Response(body.model_dump_json(), media_type="application/json")

    @routes.post("/score", response_model=ScoreList)
    @routes.post("/v1/score", response_model=ScoreList)
    async def score(request: ScoreRequest) -> Response:
        """Computes the relevance of texts to a text, or of pairs of texts."""
        served = check_not_adapter(await server.lease(request.model))
        first, second = _texts(request, FIRST), _texts(request, SECOND)
        name_fields({"data_1": _name(request, FIRST), "data_2": _name(request, SECOND)})
        outputs = await before_deadline(
            served.llm.score(first, second, truncate_prompt_tokens=request.truncate_prompt_tokens)
        )
        tokens = [len(output.prompt_token_ids) for output in outputs]
        record_input_tokens(tokens)
        body = ScoreList(
            id=new_request_id("score"),
            created=int(time.time()),
            model=served.name,
            data=[Score(index=index, score=output.outputs.score) for index, output in enumerate(outputs)],
            usage=tokens_usage(sum(tokens)),
        )
        return Response(body.model_dump_json(), media_type="application/json")

    return routes


async def _pool(served: ServedModel, request: PoolingRequest) -> list[tuple[int, Vector]]:
    """Returns the number of tokens and the numbers of each text."""
    texts = texts_of(request.input)
    name_fields(input_field_names(several=len(texts) > 1))
    most = request.truncate_prompt_tokens
    if request.task in (None, CLASSIFY):
        try:
            classes = await served.llm.classify(cast("Any", texts), truncate_prompt_tokens=most)
        except UnsupportedTaskError:
            if request.task == CLASSIFY:
                raise
        else:
            for name in ("dimensions", "normalize"):
                if getattr(request, name) is not None:
                    raise InvalidParameterError(name, getattr(request, name), "left out with probabilities")
            return [(len(each.prompt_token_ids), each.outputs.probs) for each in classes]
    vectors = await served.llm.embed(
        texts,
        pooling=None if request.task == EMBED else "none",
        normalize=request.normalize,
        dimensions=request.dimensions,
        truncate_prompt_tokens=most,
    )
    return [(len(each.prompt_token_ids), each.outputs.embedding) for each in vectors]


def _texts(request: ScoreRequest, names: tuple[str, ...]) -> str | list[str]:
    """Returns the texts of one side, which have several names.

    Raises ApiError, InvalidParameterError.
    """
    given: str | list[str] | None = one_of(request, *names)
    if given is None:
        raise ApiError(BAD_REQUEST, f"{names[0]} is required", code="missing_required_parameter", param=names[0])
    return given


def _name(request: ScoreRequest, names: tuple[str, ...]) -> str:
    """Returns the name by which the request gives one side."""
    return next(name for name in names if getattr(request, name) is not None)
