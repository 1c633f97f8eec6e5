"""Requests and responses of the routes for embeddings, classes, scores and ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, RootModel, Tag

from ferrule.server.openai.fields import (
    EMBEDDING_FIELDS,
    POOLING_FIELDS,
    RERANK_FIELDS,
)
from ferrule.server.openai.protocol.generation import Prompts
from ferrule.server.openai.protocol.usage import Usage
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedList, StrOrList
from ferrule.server.schema.response_fields import omitted_if_none
from ferrule.server.schema.unions import str_or_object


class EmbeddingRequest(RequestModel):
    """Request of POST /v1/embeddings."""

    other_fields = EMBEDDING_FIELDS

    input: Prompts
    model: str | None = None
    allow_fallback: bool | None = None
    """Whether the request may be sent to the server's fallback (default true)."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None


class ClassifyRequest(RequestModel):
    """Request of POST /classify."""

    other_fields = POOLING_FIELDS

    input: Prompts
    model: str | None = None
    truncate_prompt_tokens: int | None = None


class PoolingRequest(EmbeddingRequest):
    """Request of POST /pooling."""

    other_fields = POOLING_FIELDS

    task: Literal["embed", "token_embed", "classify"] | None = None
    """Task: the embedding of each text, of each token (default, except for classifiers), or the probabilities of a
    classifier's labels."""


class ScoreRequest(RequestModel):
    """Request of POST /v1/score."""

    other_fields = POOLING_FIELDS

    text_1: StrOrList | None = None
    text_2: StrOrList | None = None
    queries: StrOrList | None = None
    """Another name of `text_1`, as `data_1`."""
    documents: StrOrList | None = None
    """Another name of `text_2`, as `data_2`."""
    data_1: StrOrList | None = None
    data_2: StrOrList | None = None
    model: str | None = None
    truncate_prompt_tokens: int | None = None


class RerankDocument(RequestModel):
    """Document as an object (Cohere's and Jina's second form)."""

    text: str


class RerankRequest(RequestModel):
    """Request of POST /v1/rerank, with `documents` or, in the form of text-embeddings-inference, with `texts`."""

    other_fields = RERANK_FIELDS

    query: str
    documents: (
        Annotated[
            BoundedList[
                Annotated[
                    Annotated[str, Tag("<str>")] | Annotated[RerankDocument, Tag("<object>")],
                    Discriminator(str_or_object),
                ]
            ],
            Field(min_length=1),
        ]
        | None
    ) = None
    texts: Annotated[BoundedList[str], Field(min_length=1)] | None = None
    """Documents; the response is then a list of indices and scores."""
    return_text: bool = False
    """Whether the response to `texts` has the texts."""
    truncate: bool = False
    """Whether to truncate `texts` that are too long."""
    model: str | None = None
    top_n: int | None = None
    instruction: str | None = None
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None


class Embedding(BaseModel):
    """Embedding of a text, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """Response of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: Usage


class Classification(BaseModel):
    """Probabilities of a classifier's labels for a text."""

    index: int
    label: str
    """The most likely label."""
    probs: list[float]
    num_classes: int


class ClassificationList(BaseModel):
    """Response of POST /classify."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class Pooled(BaseModel):
    """Numbers computed for a text: a list, a list for each token, or base64 of little-endian float32."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | list[list[float]] | str


class PoolingList(BaseModel):
    """Response of POST /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: Usage


class Score(BaseModel):
    """Relevance of one text to another."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(BaseModel):
    """Response of POST /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RerankResult(BaseModel):
    """Index and score of a document."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = omitted_if_none()


class RerankList(BaseModel):
    """Response of POST /v1/rerank."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage


class TextRank(BaseModel):
    """Index and score of a text, in the form of text-embeddings-inference."""

    index: int
    score: float
    text: str | None = omitted_if_none()


class TextRanks(RootModel[list[TextRank]]):
    """Response of POST /v1/rerank to a request with `texts`."""
