"""The application: routes, the errors that they end in, and the guards around them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI
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
from ferrule.server.context import Context
from ferrule.server.error_responses import api_error, error_response
from ferrule.server.errors import ApiError
from ferrule.server.middleware import add_middleware
from ferrule.server.models import Models
from ferrule.server.ollama import routes as ollama
from ferrule.server.openai import chat, completions, embeddings, tokens
from ferrule.server.openai import models as models_routes
from ferrule.server.openai.protocol import ErrorResponse
from ferrule.server.page_files import page
from ferrule.server.responses import routes as responses
from ferrule.server.settings import ServerSettings
from ferrule.server.validation import unreadable_body, validation_error

ROUTERS = (
    health.router,
    metrics.router,
    models_routes.router,
    chat.router,
    completions.router,
    embeddings.router,
    tokens.router,
    responses.router,
    messages.router,
    ollama.router,
)
"""Each makes the routes of a family; one line each."""
NO_ROUTE = (404, 405)
"""Where nothing was found for what was asked."""


def create_app(
    models: Models | Mapping[str, AsyncLLM] | None = None, settings: ServerSettings | None = None
) -> FastAPI:
    """The server as an ASGI application, for any server or to be mounted in another application.

    `models` are by the names that requests use; None is the small model that ships with ferrule. The application needs
    no lifespan of its own, and closes nothing: whoever made an AsyncLLM closes it. A `Models` can be made before there
    is an event loop, and be `set` in the lifespan of the application around it.

        engines = {EMBEDDED: AsyncLLM()}
        app = FastAPI()
        app.mount("/llm", create_app(engines))

    Raises InvalidParameterError, and as AsyncLLM where it loads one.
    """
    settings = settings or ServerSettings()
    if not isinstance(models, Models):
        models = Models({EMBEDDED: AsyncLLM()} if models is None else models)
    server = Context.of(models, settings)
    app = FastAPI(
        title="ferrule",
        version=__version__,
        summary="LLM inference on CPUs, behind OpenAI's API",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        responses={"default": {"model": ErrorResponse, "description": "What went wrong"}},
    )
    app.state.server = server
    for router in ROUTERS:
        app.include_router(router(server))
    if settings.page:
        # Where no route answers; a mount at / would answer for those that know another method.
        app.router.default = page(Path(__file__).parent / "page")
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
            asked = f"{request.method} {shown(request.url.path)}"
            message = f"{phrase}: there is no {asked} here" if error.status_code in NO_ROUTE else str(error.detail)
            code = phrase.lower().replace(" ", "_")
            return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))
        case _:
            raise error
