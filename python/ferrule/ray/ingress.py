"""`Ingress`: receives HTTP requests and passes each one to a replica of its model.

Ray's HTTP proxies choose a replica before they have received the body of a request. The ingress has the body, which
names the model, so that its router (`prefix_router.py`) can send the turns of a conversation to the same engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPMethod, HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule._engine.workers import LARGE_INPUT, workers_for
from ferrule.ray.merged import merged_lists, merged_metrics
from ferrule.ray.replica import ReplicaResponse
from ferrule.ray.request_key import RequestKey, request_key
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
STATE_TIMEOUT = 10.0
"""Seconds that the replicas have to return their metrics, their health or their models."""
LISTS = {"/v1/models": "data", "/models": "data", "/api/tags": "models", "/api/ps": "models"}
"""Field with the list, by path of a list of models."""
HEALTH = ("/health", "/v1/health")
"""Paths that describe all models."""
CARDS = ("/v1/models/", "/models/")
"""Beginnings of paths that end with the name of a model."""
LATEST = ":latest"
"""Tag that Ollama's clients append to names of models."""
WITHOUT_CACHE = (
    *("/embeddings", "/embedding", "/embed", "/pooling", "/classify", "/score", "/rerank", "/reranking"),
    *("/tokenize", "/detokenize"),
)
"""Ends of the paths whose requests do not use the prefix cache."""


class ModelReplicas(NamedTuple):
    """The deployment of a model."""

    names: Sequence[str]
    """Names of the model in requests."""
    adapters: Sequence[str]
    """Names of its adapters in requests."""
    handle: Any
    """Handle of the deployment of `ServerReplica`."""


class Route(NamedTuple):
    """Replicas that requests for a name go to."""

    respond: Any
    """Method `ServerReplica.respond` of the replicas, as a stream."""
    adapter: str | None = None
    """Name of the adapter; None for the model itself."""


class Ingress:
    """Passes requests to replicas and their responses back, without waiting for the end of a stream."""

    def __init__(self, models: Sequence[ModelReplicas], settings: ServerSettings) -> None:
        """The replicas have the same `settings`. The first model serves requests that name none or an unknown one."""
        self._models = models
        self._settings = settings
        self._routes: dict[str, Route] = {}
        for model in models:
            route = Route(model.handle.options(stream=True).respond)
            self._routes.update(dict.fromkeys(model.names, route))
        for model in models:
            respond = self._routes[model.names[0]].respond
            for adapter in model.adapters:  # as in the server, the first model that has an adapter serves it
                self._routes.setdefault(adapter, Route(respond, adapter))

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
        if scope["method"] in (HTTPMethod.GET, HTTPMethod.HEAD) and (path in LISTS or path in HEALTH):
            await (await self._of_all_models(path, fields))(scope, receive, send)
            return
        body = await _body(receive)
        if body is not None:
            key = await _request_key(body) if body else RequestKey(_model_of(path, scope["query_string"]))
            prefix = None if path.endswith(WITHOUT_CACHE) else key.conversation
            route = self._route(key.model)
            await _stream(route.respond.remote(fields, body, prefix=prefix, adapter=route.adapter), send)

    def _route(self, name: str | None) -> Route:
        """Returns the route of a model or an adapter; for an unknown name that of the first, with the error."""
        for known in () if name is None else (name, name.removesuffix(LATEST)):
            if known in self._routes:
                return self._routes[known]
        return self._routes[self._models[0].names[0]]

    async def _of_all_models(self, path: str, fields: Mapping[str, Any]) -> Response:
        """Returns a list of all models, or the health of all.

        Raises ApiError if the replicas of a model do not answer in time.
        """

        async def ask(model: ModelReplicas) -> ReplicaResponse:
            try:
                async with asyncio.timeout(STATE_TIMEOUT):
                    return await model.handle.response.remote(fields)
            except TimeoutError:
                message = f"a replica of {model.names[0]} must answer within {STATE_TIMEOUT:g} s"
                raise ApiError(UNAVAILABLE, message, code="engine_unavailable") from None
            except RayTaskError:  # a bug of the replica
                raise
            except (RayError, RayServeException) as error:
                raise _unavailable(error) from None

        found = await asyncio.gather(*map(ask, self._models))
        failed = [response for response in found if response.status != HTTPStatus.OK]
        if path in LISTS and not failed:
            return Response(merged_lists(found, LISTS[path]), media_type="application/json")
        response = (failed or found)[0]
        return Response(response.body, response.status, dict(response.headers))

    async def _metrics(self, fields: Mapping[str, Any]) -> Response:
        """Returns the metrics of all replicas; each sample has the label `replica`.

        Raises ApiError if no replica answers, or one of them does not answer in time.
        """
        by_model = await asyncio.gather(*(_broadcast(model.handle, fields) for model in self._models))
        found = [each for of_model in by_model for each in of_model]
        answered = [each for each in found if isinstance(each, ReplicaResponse)]
        if not answered:
            raise _unavailable(next(each for each in found if isinstance(each, Exception)))  # all have died meanwhile
        for response in answered:
            if response.status != HTTPStatus.OK:  # such as a missing API key
                return Response(response.body, response.status, dict(response.headers))
        return Response(merged_metrics(answered), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _stream(responses: Any, send: Send) -> None:
    """Sends the response of a replica. An error after its beginning ends the connection.

    Raises ApiError if no replica answers.
    """
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


async def _broadcast(replicas: Any, fields: Mapping[str, Any]) -> list[ReplicaResponse | Exception]:
    """Returns the responses of the replicas of a model, or the error of each that did not answer.

    Raises ApiError if one of them does not answer in time.
    """
    try:
        responses = replicas.broadcast("response", fields)
        return await responses.results_async(timeout_s=STATE_TIMEOUT, return_exceptions=True)
    except TimeoutError:
        message = f"the replicas must return their metrics within {STATE_TIMEOUT:g} s"
        raise ApiError(UNAVAILABLE, message, code="engine_unavailable") from None
    except (RayError, RayServeException) as error:
        return [error]


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
    """Returns the body of a request; None if its client disconnected. A large one is joined in a worker thread."""
    pieces: list[bytes] = []
    while (message := await receive())["type"] != "http.disconnect":
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            size = sum(map(len, pieces))
            return b"".join(pieces) if size < LARGE_INPUT else await workers_for(size).run(b"".join, pieces)
    return None


async def _request_key(body: bytes) -> RequestKey:
    size = len(body)
    return request_key(body) if size < LARGE_INPUT else await workers_for(size).run(request_key, body)


def _model_of(path: str, query: bytes) -> str | None:
    """Returns the name of the model in the path or the query of a request without a body; None if it has none."""
    for beginning in CARDS:
        if path.startswith(beginning):
            return path.removeprefix(beginning)
    return parse_qs(query.decode("latin-1")).get("model", [None])[-1]


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
