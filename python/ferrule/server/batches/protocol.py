"""Requests and objects of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from ferrule.server.schema.base import FieldRules, RequestModel, Unsupported
from ferrule.server.schema.limits import BoundedDict

BATCH, BATCH_OUTPUT = "batch", "batch_output"
"""Purposes of files."""
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"
]
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})
"""Statuses that never change."""
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Limits of metadata, as in OpenAI's API: pairs, characters of a key, characters of a value."""
BATCH_FIELDS: FieldRules = {"output_expires_after": Unsupported("files are kept until they are deleted")}


class StoredFile(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    """Seconds since 1970."""
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: None = None
    """Always null: files are kept until they are deleted."""


class DeletedFile(BaseModel):
    """Answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def _check_metadata(given: dict[str, str]) -> dict[str, str]:
    if len(given) > MAX_PAIRS or any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in given.items()):
        message = "must have at most {pairs} keys of {key} characters with values of {value} characters"
        raise PydanticCustomError("metadata", message, {"pairs": MAX_PAIRS, "key": MAX_KEY, "value": MAX_VALUE})
    return given


class BatchRequest(RequestModel):
    """Request of POST /v1/batches."""

    other_fields = BATCH_FIELDS

    input_file_id: str
    endpoint: Endpoint
    """Endpoint of all requests of the batch."""
    completion_window: Literal["24h"]
    metadata: Annotated[BoundedDict[str], AfterValidator(_check_metadata)] | None = None


class BatchError(BaseModel):
    """Reason why a batch failed."""

    code: str
    message: str
    line: int | None = None
    """Number of the line of the input file, from 1."""
    param: str | None = None


class BatchErrors(BaseModel):
    """Reasons why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Numbers of requests of a batch."""

    total: int = 0
    completed: int = 0
    """Requests with a successful response."""
    failed: int = 0


class Batch(BaseModel):
    """A batch. Times are seconds since 1970, and null before they are reached."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    """File with the successful responses; null if there are none."""
    error_file_id: str | None = None
    """File with the other responses and with the requests that were not run; null if there are none."""
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = Field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


Item = TypeVar("Item", StoredFile, Batch)


class Page(BaseModel, Generic[Item]):
    """Page of a list."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: list[Item], *, has_more: bool) -> Page[Item]:
        """Creates a page with the ids of its first and last items."""
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)
