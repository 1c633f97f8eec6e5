"""Routes of /v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from ferrule.server.batches.jobs import Batches
from ferrule.server.batches.protocol import BATCH, Batch, BatchRequest, DeletedFile, Page, StoredFile
from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.request_body import BodyRoute

FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": [BATCH]}},
                }
            }
        },
    }
}
"""Description of an upload."""
MAX_LISTED_FILES, MAX_LISTED_BATCHES = 10_000, 100
"""Maximum number of items of a page, as in OpenAI's API."""


def router(batches: Batches | None) -> APIRouter:
    """Creates the routes; without `batches` they answer an error that says how to enable them."""
    routes = APIRouter(route_class=BodyRoute)

    def enabled() -> Batches:
        if batches is None:
            message = "files and batches are disabled; start the server with --files-dir"
            raise ApiError(404, message, code="batches_disabled")
        batches.start()
        return batches

    @routes.post("/files", include_in_schema=False)
    @routes.post("/v1/files", openapi_extra=FORM)
    async def upload_file(request: Request) -> StoredFile:
        """Stores a file of requests: a form with the fields `file` and `purpose`, which must be `batch`."""
        return await enabled().files.upload(request.headers.get("content-type"), _received(request))

    @routes.get("/files", include_in_schema=False)
    @routes.get("/v1/files")
    async def list_files(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Page[StoredFile]:
        """Lists files, the newest first by default."""
        found, more = enabled().files.records.page(
            after, limit, newest_first=order == "desc", wanted=lambda file: purpose in (None, file.purpose)
        )
        return Page[StoredFile].of(found, has_more=more)

    @routes.get("/files/{file_id}", include_in_schema=False)
    @routes.get("/v1/files/{file_id}")
    async def get_file(file_id: str) -> StoredFile:
        """Describes a file."""
        return enabled().files.records.find(file_id)

    @routes.get("/files/{file_id}/content", include_in_schema=False)
    @routes.get("/v1/files/{file_id}/content", response_class=StreamingResponse)
    async def get_content(file_id: str) -> StreamingResponse:
        """Returns the content of a file."""
        files = enabled().files
        record = files.records.find(file_id)
        headers = {"Content-Length": str(record.bytes), "X-Content-Type-Options": "nosniff"}
        return StreamingResponse(await files.content(record), media_type="application/octet-stream", headers=headers)

    @routes.delete("/files/{file_id}", include_in_schema=False)
    @routes.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str) -> DeletedFile:
        """Deletes a file, unless a batch reads it."""
        found = enabled()
        record = found.files.records.find(file_id)
        found.check_unused(file_id)
        await found.files.delete(record)
        return DeletedFile(id=file_id)

    @routes.post("/batches", include_in_schema=False)
    @routes.post("/v1/batches")
    async def create_batch(request: BatchRequest) -> Batch:
        """Starts a batch: the requests of a file run with a lower priority than all other requests."""
        return await enabled().create(request)

    @routes.get("/batches", include_in_schema=False)
    @routes.get("/v1/batches")
    async def list_batches(
        after: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_LISTED_BATCHES)] = 20
    ) -> Page[Batch]:
        """Lists batches, the newest first."""
        found, more = enabled().records.page(after, limit, newest_first=True)
        return Page[Batch].of(found, has_more=more)

    @routes.get("/batches/{batch_id}", include_in_schema=False)
    @routes.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str) -> Batch:
        """Describes a batch and its progress."""
        return enabled().records.find(batch_id)

    @routes.post("/batches/{batch_id}/cancel", include_in_schema=False)
    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str) -> Batch:
        """Cancels a batch; the responses that it has become its output."""
        return await enabled().cancel(batch_id)

    return routes


async def _received(request: Request) -> AsyncIterator[bytes]:
    """Yields the body of a request. Raises ApiError where the client disconnects before its end."""
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise ApiError(BAD_REQUEST, "request body is incomplete", code="invalid_multipart") from None
