"""The ASGI application: routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ferrule import __version__
from ferrule._api.async_llm import AsyncLLM
from ferrule._loading import EMBEDDED
from ferrule._validation import shown
from ferrule.errors import FerruleError
from ferrule.server import health, metrics
from ferrule.server.anthropic import routes as messages
from ferrule.server.batches import routes as batch_routes
from ferrule.server.batches.jobs import Batches
from ferrule.server.context import Context
from ferrule.server.error_responses import api_error, error_response
from ferrule.server.errors import ApiError
from ferrule.server.llama_cpp import metrics as llama_cpp_metrics
from ferrule.server.llama_cpp import routes as llama_cpp
from ferrule.server.llama_cpp import slots
from ferrule.server.middleware import add_middleware
from ferrule.server.models import Models
from ferrule.server.ollama import routes as ollama
from ferrule.server.openai import chat, completions, embeddings, pooling, tokens
from ferrule.server.openai import models as models_routes
from ferrule.server.openai.protocol.errors import ErrorResponse
from ferrule.server.page_files import Page
from ferrule.server.pdf_text import router as pdf_router
from ferrule.server.residency import OnDemand
from ferrule.server.responses import routes as responses
from ferrule.server.responses import stored_routes as stored_responses
from ferrule.server.responses.background import BackgroundResponses
from ferrule.server.responses.store import ResponseStore
from ferrule.server.settings import ServerSettings
from ferrule.server.validation import unreadable_body, validation_error

ROUTERS = (
    health.router,
    models_routes.router,
    chat.router,
    completions.router,
    embeddings.router,
    pooling.router,
    tokens.router,
    messages.router,
    ollama.router,
    llama_cpp.router,
    slots.router,
    pdf_router,
)
"""Functions that create the routes of the APIs without stored state, except /metrics."""
BATCH_ROUTERS = (chat.router, completions.router, embeddings.router)
"""Functions that create the routes of requests in batches."""
NO_ROUTE = (404, 405)
"""Statuses of a request without a route."""


def create_app(
    models: Models | Mapping[str, AsyncLLM | OnDemand] | None = None, settings: ServerSettings | None = None
) -> FastAPI:
    """Creates the server as an ASGI application, which can be mounted in another application.

    `models` maps the names that requests use to models; the default is the small model that ships with ferrule. The
    application has no lifespan and closes nothing: the creator of an AsyncLLM closes it, and `Models.aclose` the models
    that were loaded on demand. A `Models` can be created
    before there is an event loop and filled with `set` in the lifespan of the outer application. With `files_dir`,
    `app.state.batches.aclose()` interrupts running batches, and with `responses_db` `app.state.background.aclose(0)`
    background responses; call them before the AsyncLLM is closed.

        engines = {EMBEDDED: AsyncLLM()}
        app = FastAPI()
        app.mount("/llm", create_app(engines))

    Raises InvalidParameterError; with `models=None` also the errors of AsyncLLM.
    """
    settings = settings or ServerSettings()
    if not isinstance(models, Models):
        models = Models({EMBEDDED: AsyncLLM()} if models is None else models)
    server = Context.of(models, settings)
    batches = None
    if settings.files_dir is not None:
        batches = Batches(server, lambda inner: _application(inner, [router(inner) for router in BATCH_ROUTERS]))
    background = None
    if settings.responses_db is not None:
        store = ResponseStore(Path(settings.responses_db), settings.max_stored_responses)
        background = BackgroundResponses(server, store)
    measured = llama_cpp_metrics if settings.metrics_prefix == llama_cpp_metrics.PREFIX else metrics
    stateful = (
        batch_routes.router(batches),
        responses.router(server, background),
        stored_responses.router(server, background),
    )
    app = _application(server, [*(router(server) for router in (*ROUTERS, measured.router)), *stateful])
    app.state.batches, app.state.background = batches, background
    if settings.page:
        # As the default application: a mount at / would hide the 405 of routes with another method.
        app.router.default = Page(Path(__file__).parent / "page")
    return app


def _application(server: Context, routers: Iterable[APIRouter]) -> FastAPI:
    """Creates an application with routes, error handlers and middleware."""
    app = FastAPI(
        title="ferrule",
        version=__version__,
        summary="LLM inference on CPUs, behind OpenAI's API",
        docs_url=None,  # the page loads scripts from other hosts
        redoc_url=None,
        responses={"default": {"model": ErrorResponse, "description": "Error"}},
    )
    app.state.server = server
    for router in routers:
        app.include_router(router)
    for kind in (FerruleError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    add_middleware(app, server)
    return app


async def _answer(request: Request, error: Exception) -> JSONResponse:
    match error:
        case ApiError():
            return error_response(error)
        case FerruleError():
            return error_response(api_error(error))
        case RequestValidationError():
            return error_response(validation_error(error))
        case HTTPException() if (cause := error.__cause__) is not None:
            return error_response(unreadable_body(cause))
        case HTTPException():
            phrase = HTTPStatus(error.status_code).phrase
            route = f"{request.method} {shown(request.url.path)}"
            message = f"no route: {route}" if error.status_code in NO_ROUTE else str(error.detail)
            code = phrase.lower().replace(" ", "_")
            return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))
        case _:
            raise error
