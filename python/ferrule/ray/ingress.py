"""`Ingress`: receives HTTP requests and passes each one to a replica with an engine.

Ray's HTTP proxies choose a replica before they have received the body of a request. The ingress has the body, so that
its router (`prefix_router.py`) can send the turns of a conversation to the same engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPMethod
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule._engine.workers import LARGE_INPUT
from ferrule.ray.conversation_key import conversation_key
from ferrule.ray.replica import ReplicaResponse
from ferrule.server.apis import api_of
from ferrule.server.context import Context
from ferrule.server.counters import RequestCounters
from ferrule.server.error_responses import error_response
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.middleware.admission import Admission
from ferrule.server.middleware.base import Middleware, route_path
from ferrule.server.middleware.bodies import Bodies
from ferrule.server.middleware.headers import HeaderLimits
from ferrule.server.middleware.hosts import Hosts
from ferrule.server.middleware.keys import Keys
from ferrule.server.middleware.root_path import RootPath
from ferrule.server.models import Models
from ferrule.server.request_record import RequestRecord, current_record
from ferrule.server.settings import ServerSettings

FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers"),
    *("client", "server"),
)
"""Fields of an ASGI scope that replicas receive; the others are objects of this process."""
METRICS = "/metrics"
"""Path that all replicas answer together."""
METRICS_TIMEOUT = 10.0
"""Seconds that the replicas have to answer it."""
WITHOUT_CACHE = (
    *("/embeddings", "/embedding", "/embed", "/pooling", "/classify", "/score", "/rerank", "/reranking"),
    *("/tokenize", "/detokenize"),
)
"""Ends of the paths whose requests do not use the prefix cache."""


class Ingress:
    """Passes requests to replicas and their responses back, without waiting for the end of a stream."""

    def __init__(self, replicas: Any, settings: ServerSettings) -> None:
        """`replicas` is the handle of the deployment of `ServerReplica`, whose `settings` are the same."""
        self._replicas = replicas
        self._respond = replicas.options(stream=True).respond
        self._settings = settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application that Serve runs.

        It has the checks of the server that need no model, so that a request that fails one of them is rejected
        before its body is received.
        """
        registry = CollectorRegistry()
        # Each replica limits its requests; the ingress limits only those whose bodies are being received.
        settings = replace(self._settings, max_concurrent_requests=None)
        counters = RequestCounters(settings.metrics_prefix, registry)
        context = Context(Models(), settings, registry, counters, tracing=None)
        application: ASGIApp = self._pass_on
        for layer in (Admission, Bodies, Keys, Hosts, HeaderLimits, _Errors, RootPath):
            application = layer(application, server=context)
        return Router(default=application)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to a replica, or to all replicas.

        Raises ApiError before the response has begun.
        """
        if scope["type"] != "http":  # the server has no websockets
            await send({"type": "websocket.close", "code": 1000})
            return
        fields = {name: scope[name] for name in FIELDS if name in scope}
        path = route_path(scope)
        if scope["method"] == HTTPMethod.GET and path == METRICS:
            await (await self._metrics(fields))(scope, receive, send)
            return
        body = await _body(receive)
        if body is not None:
            prefix = None if path.endswith(WITHOUT_CACHE) else await _prefix(body)
            await self._stream(fields, body, prefix, send)

    async def _stream(self, fields: Mapping[str, Any], body: bytes, prefix: str | None, send: Send) -> None:
        """Sends the response of a replica. An error after its beginning ends the connection.

        Raises ApiError if no replica answers.
        """
        responses = self._respond.remote(fields, body, prefix=prefix)
        begun = ended = False
        try:
            async for messages in responses:
                for message in messages:
                    begun = True
                    await send(message)
            ended = True
        except (RayError, RayServeException) as error:
            if begun or isinstance(error, RayTaskError):  # a RayTaskError is a bug of the replica
                raise
            raise _unavailable(error) from None
        finally:
            if not ended:  # the client disconnected, or an error
                responses.cancel()

    async def _metrics(self, fields: Mapping[str, Any]) -> Response:
        """Returns the metrics of all replicas; each sample has the label `replica`.

        Raises ApiError if no replica answers, or one of them does not answer in time.
        """
        responses = self._replicas.broadcast("response", fields)
        try:
            found = await responses.results_async(timeout_s=METRICS_TIMEOUT, return_exceptions=True)
        except TimeoutError:
            message = f"the replicas must return their metrics within {METRICS_TIMEOUT:g} s"
            raise ApiError(UNAVAILABLE, message, code="engine_unavailable") from None
        except (RayError, RayServeException) as error:
            raise _unavailable(error) from None
        answered = [each for each in found if isinstance(each, ReplicaResponse)]  # the others died meanwhile
        if not answered:
            raise _unavailable(found[0])
        for response in answered:
            if response.status != 200:  # such as a missing API key
                return Response(response.body, response.status, dict(response.headers))
        return Response(merged_metrics(answered), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Errors(Middleware):
    """Answers with the errors of the inner application, in the form of the request's API."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        record = RequestRecord(request_id="", error_body=api_of(route_path(scope)).error_body)
        token = current_record.set(record)
        try:
            await self.app(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        finally:
            current_record.reset(token)


async def _body(receive: Receive) -> bytes | None:
    """Returns the body of a request; None if its client disconnected."""
    body = bytearray()
    while (message := await receive())["type"] != "http.disconnect":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
    return None


async def _prefix(body: bytes) -> str | None:
    return conversation_key(body) if len(body) < LARGE_INPUT else await asyncio.to_thread(conversation_key, body)


def _unavailable(error: Exception) -> ApiError:
    """Returns the error of a request that no replica has answered."""
    match error:
        case BackPressureError(args=[_, limit, *_]):
            message, code = f"the request queue is full ({limit} waiting; max_queued_requests)", "queue_full"
        case RayActorError():
            message, code = "the replica died or could not be reached before it answered", "engine_died"
        case TaskCancelledError():
            message, code = "the replica was stopped before it answered", "engine_unavailable"
        case DeploymentUnavailableError():
            message = "no replica is available; the log of Ray Serve has the reason"
            code = "engine_unavailable"
        case _:
            message, code = f"no replica has answered ({type(error).__name__})", "engine_unavailable"
    return ApiError(UNAVAILABLE, message, code=code)


def merged_metrics(responses: Sequence[ReplicaResponse]) -> bytes:
    """Returns the metrics of replicas in Prometheus' text format."""
    families: dict[str, Metric] = {}
    for response in responses:
        for family in text_string_to_metric_families(response.body.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, "replica": response.replica}))
    return generate_latest(_Families(list(families.values())))


class _Families(Collector):
    """Metrics that were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """Returns the metrics."""
        return self._families
