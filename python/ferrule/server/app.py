"""The application: routes, the errors that they end in, and the guards around them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ferrule import __version__
from ferrule.async_llm import AsyncLLM
from ferrule.errors import FerruleError
from ferrule.server import health
from ferrule.server.context import Context, current
from ferrule.server.errors import ApiError, api_error
from ferrule.server.models import Models
from ferrule.server.openai import chat
from ferrule.server.openai import models as models_routes
from ferrule.server.openai.protocol import ErrorResponse
from ferrule.server.page_files import page
from ferrule.server.settings import ServerSettings
from ferrule.server.validation import invalid_request

ROUTERS = (health.router, models_routes.router, chat.router)
"""Each makes the routes of a family; one line each."""


def create_app(
    models: Models | Mapping[str, AsyncLLM] | None = None, settings: ServerSettings | None = None
) -> FastAPI:
    """The server as an ASGI application, for any server or to be mounted in another application.

    `models` are by the names that requests use; None is the small model that ships with ferrule. The application needs
    no lifespan of its own, and closes nothing: whoever made an AsyncLLM closes it.

        engines = {"tiny": AsyncLLM()}
        app = FastAPI()
        app.mount("/llm", create_app(engines))

    Raises InvalidParameterError, and as AsyncLLM where it loads one.
    """
    settings = settings or ServerSettings()
    if not isinstance(models, Models):
        models = Models({"tiny": AsyncLLM()} if models is None else models)
    server = Context(models, settings)
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
        app.mount("/", page(Path(__file__).parent / "page"), name="page")
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(FerruleError, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(Exception, _answer)
    return app


async def _answer(_request: Request, error: Exception) -> JSONResponse:
    found = _as_api_error(error)
    record = current.get()
    if record is not None:
        record.error = found.code
    return JSONResponse(found.body(), found.status, headers=found.headers)


def _as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case FerruleError():
            return api_error(error)
        case RequestValidationError():
            return invalid_request(error)
        case HTTPException():
            phrase = HTTPStatus(error.status_code).phrase
            headers: dict[str, Any] = dict(error.headers or {})
            return ApiError(
                error.status_code, str(error.detail), code=phrase.lower().replace(" ", "_"), headers=headers
            )
        case _:
            return ApiError(500, "a defect of the server: see its log", code="internal_error")
