"""`Ingress`: receives HTTP requests and passes each one to a replica with an engine.

Ray's HTTP proxies choose a replica before they have received the body of a request. The ingress has the body, so that
its router (`prefix_router.py`) can send the turns of a conversation to the same engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPMethod
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule.ray.conversation_key import conversation_key
from ferrule.ray.replica import Answer
from ferrule.server.error_responses import error_response
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.middleware.base import route_path
from ferrule.server.settings import ServerSettings

FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers"),
    *("client", "server"),
)
"""Fields of an ASGI scope that replicas receive; the others are objects of this process."""
METRICS = "/metrics"
"""Path that all replicas answer together."""


class Ingress:
    """Passes requests to replicas and their responses back, without waiting for the end of a stream."""

    def __init__(self, replicas: Any, settings: ServerSettings) -> None:
        """`replicas` is the handle of the deployment of `ServerReplica`, whose `settings` are the same."""
        self._replicas = replicas
        self._respond = replicas.options(stream=True).respond
        self._settings = settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application that Serve runs."""
        return Router(default=self._pass_on)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server has no websockets
            await send({"type": "websocket.close", "code": 1000})
            return
        fields = {name: scope[name] for name in FIELDS if name in scope}
        try:
            if scope["method"] == HTTPMethod.GET and route_path(scope) == METRICS:
                await (await self._metrics(fields))(scope, receive, send)
                return
            body = await self._body(receive)
            if body is not None:
                await self._stream(fields, body, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Returns the body of a request; None if its client disconnected.

        A body that is too large is not read to its end, and the replica answers with the error.

        Raises ApiError for a body that takes too long.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while len(body) <= self._settings.max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            limit = f"{self._settings.body_timeout:g} s"
            message = f"request body must be complete within {limit}, got {len(body)} bytes"
            raise ApiError(408, message, code="body_timeout") from None
        return bytes(body)

    async def _stream(self, fields: Mapping[str, Any], body: bytes, send: Send) -> None:
        """Sends the response of a replica. An error after its beginning ends the connection.

        Raises ApiError if the replica died before it answered.
        """
        responses = self._respond.remote(fields, body, prefix=conversation_key(body))
        begun = False
        try:
            async for messages in responses:
                for message in messages:
                    begun = True
                    await send(message)
        except RayActorError:
            if begun:
                raise
            raise _died() from None
        except asyncio.CancelledError:  # the client disconnected
            responses.cancel()
            raise

    async def _metrics(self, fields: Mapping[str, Any]) -> Response:
        """Returns the metrics of all replicas; each sample has the label `replica`.

        Raises ApiError if no replica answers.
        """
        found = await self._replicas.broadcast("answer", fields).results_async(return_exceptions=True)
        answers = [answer for answer in found if isinstance(answer, Answer)]  # the others died meanwhile
        if not answers:
            raise _died()
        for answer in answers:
            if answer.status != 200:  # such as a missing API key
                return Response(answer.body, answer.status, dict(answer.headers))
        return Response(merged_metrics(answers), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _died() -> ApiError:
    return ApiError(UNAVAILABLE, "the replica died before it answered", code="engine_died")


def merged_metrics(answers: Sequence[Answer]) -> bytes:
    """Returns the metrics of replicas in Prometheus' text format."""
    families: dict[str, Metric] = {}
    for answer in answers:
        for family in text_string_to_metric_families(answer.body.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, "replica": answer.replica}))
    return generate_latest(_Families(list(families.values())))


class _Families(Collector):
    """Metrics that were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """Returns the metrics."""
        return self._families
