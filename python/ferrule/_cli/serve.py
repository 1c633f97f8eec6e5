"""`ferrule serve`: models behind OpenAI's API."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ferrule._cli.help import Command, options
from ferrule._cli.model import check_model, loading, model_options, prefix_cache_option, speculative_options
from ferrule._cli.parent_process import PARENT_PID
from ferrule._loading import EMBEDDED

if TYPE_CHECKING:
    from ferrule._api.async_llm import AsyncLLM
    from ferrule.server import ServerSettings

API_KEYS = "FERRULE_API_KEYS"
"""The environment variable with keys, commas between: other users of a machine see a command line."""
SETTINGS = (
    *("api_keys", "allowed_hosts", "allowed_origins", "max_body_bytes", "request_timeout", "drain_timeout"),
    *("max_concurrent_requests", "metrics_prefix", "tool_call_parser", "reasoning_parser", "lora_dir"),
    *("otlp_traces_endpoint", "ollama", "page"),
)
"""Options that are fields of ServerSettings; those left out keep its defaults."""


@click.command(
    "serve",
    cls=Command,
    examples=[
        ("The small model that ships with ferrule, at http://127.0.0.1:8000", "ferrule serve"),
        ("Another one, for whoever has the key", "ferrule serve Qwen/Qwen3-0.6B --port 8080 --api-key secret"),
        ("Two, by names that requests use", "ferrule serve --model small=./model-a --model large=./model-b"),
    ],
)
@click.argument("model", required=False)
@options(
    "Models",
    [
        (
            ("--model", "aliases"),
            {
                "multiple": True,
                "metavar": "NAME=MODEL",
                "help": "Serve another model, or the same by another name. May be repeated; the first answers where "
                "none is named.",
            },
        ),
        (
            ("--lora-module", "lora_modules"),
            {"multiple": True, "metavar": "NAME=PATH", "help": "Load an adapter of the model."},
        ),
        (
            ("--lora-dir",),
            {"type": click.Path(exists=True, file_okay=False), "help": "Let adapters from there be loaded over HTTP."},
        ),
        (
            ("--tool-call-parser",),
            {"help": "How the model writes tool calls. Default: what its chat template tells."},
        ),
        (("--reasoning-parser",), {"help": "Likewise, reasoning."}),
    ],
)
@options(
    "Who may ask",
    [
        (("--host",), {"default": "127.0.0.1", "show_default": True, "help": "The address to listen at."}),
        (
            ("--port",),
            {"type": click.IntRange(0, 65535), "default": 8000, "show_default": True, "help": "0 takes a free one."},
        ),
        (
            ("--api-key", "api_keys"),
            {"multiple": True, "help": f"Ask for this key. May be repeated; also ${API_KEYS}."},
        ),
        (
            ("--allowed-host", "allowed_hosts"),
            {"multiple": True, "metavar": "NAME", "help": "Answer to this name; * to all."},
        ),
        (
            ("--allowed-origin", "allowed_origins"),
            {"multiple": True, "metavar": "URL", "help": "Let pages of this site ask; * all."},
        ),
        (("--ollama",), {"is_flag": True, "help": "Serve Ollama's API too, below /api."}),
        (("--no-page", "page"), {"flag_value": False, "default": True, "help": "No chat page at /."}),
    ],
)
@options(
    "Limits and the end",
    [
        (("--max-num-seqs",), {"type": click.IntRange(min=1), "help": "Sequences that run at once."}),
        (
            ("--max-queued-requests",),
            {"type": click.IntRange(min=1), "help": "Sequences that may wait; others get 503."},
        ),
        (("--max-concurrent-requests",), {"type": int, "help": "Default: what runs and what may wait."}),
        (("--max-body-bytes",), {"type": int, "help": "Largest request."}),
        (
            ("--request-timeout",),
            {"type": float, "metavar": "SECONDS", "help": "The longest that a request may take."},
        ),
        (
            ("--drain-timeout",),
            {"type": float, "metavar": "SECONDS", "help": "What requests get to end in after SIGTERM."},
        ),
        (
            ("--exit-with-parent",),
            {"is_flag": True, "help": "Drain and end when the process that started this one has."},
        ),
    ],
)
@options(
    "Watching",
    [
        (
            ("--metrics-prefix",),
            {"help": "Of names at /metrics: ferrule: if left out; vllm: for its dashboards."},
        ),
        (
            ("--otlp-traces-endpoint",),
            {"metavar": "URL", "help": "Send a span of each request there (OpenTelemetry)."},
        ),
    ],
)
@model_options
@prefix_cache_option
@speculative_options
def command(
    *,
    model: str | None,
    aliases: Sequence[str],
    host: str,
    port: int,
    lora_modules: Sequence[str],
    exit_with_parent: bool,
    **options: Any,
) -> None:
    """Serve MODEL, or the small model that ships with ferrule, behind OpenAI's API, with a chat page at /."""
    with _interrupts_noted():
        models = _models(model, aliases)
        settings = _settings(options)
        adapters = dict(_pair("--lora-module", module, "NAME=PATH") for module in lora_modules)
        keywords = loading({name: value for name, value in options.items() if value is not None})
        if adapters:
            keywords["lora_modules"] = adapters
        from ferrule.server import serve
        from ferrule.server.middleware.log import LOGGER

    def started(url: str) -> None:
        LOGGER.info("listening", extra={"fields": {"url": url, "models": list(models)}})

    try:
        with _json_lines():
            serve(
                lambda: _load(models, keywords),
                settings,
                host=host,
                port=port,
                on_listening=started,
                parent=PARENT_PID if exit_with_parent else None,
            )
    except OSError as error:
        if error.errno is None:  # an error of ours about a model's file
            raise
        raise click.UsageError(f"{host}:{port}: {error.strerror}") from error


@contextmanager
def _interrupts_noted() -> Generator[None]:
    """Raises KeyboardInterrupt at its end: amid imports there are places in which Python ignores it."""
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set, and none is called
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _json_lines() -> Generator[None]:
    """Writes what anybody logs to stderr, as one JSON object a line."""
    from ferrule.server.middleware.log import LOGGER, JSONFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter())
    root = logging.getLogger()
    LOGGER.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _models(model: str | None, aliases: Sequence[str]) -> dict[str, str | None]:
    """Names of models, as they are found, by the names that they have for clients."""
    models: dict[str, str | None] = {}
    if model is not None or not aliases:
        models[model or EMBEDDED] = None if model is None else check_model(model)
    for alias in aliases:
        name, path = _pair("--model", alias, "NAME=MODEL")
        if name in models:
            raise click.UsageError(f"--model has the name {name!r} twice")
        models[name] = check_model(path)
    return models


def _pair(option: str, given: str, form: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not (name and separator and value):
        raise click.UsageError(f"{option} is {given!r}; it must be {form}")
    return name, value


def _settings(options: dict[str, Any]) -> ServerSettings:
    """Takes the settings out of the options.

    Raises InvalidParameterError; click.UsageError where the server is not installed.
    """
    try:
        from ferrule.server import ServerSettings
    except ModuleNotFoundError as error:
        raise click.UsageError(f"the server needs {error.name}: pip install 'ferrule[server]'") from error
    given = {name: options.pop(name) for name in SETTINGS}
    given["api_keys"] = (*given["api_keys"], *filter(None, os.environ.get(API_KEYS, "").split(",")))
    return ServerSettings(**{name: value for name, value in given.items() if value is not None})


def _load(models: Mapping[str, str | None], keywords: Mapping[str, Any]) -> dict[str, AsyncLLM]:
    """Loads each model once, however many names it has."""
    from ferrule._api.async_llm import AsyncLLM

    loaded: dict[str | None, AsyncLLM] = {}
    for path in models.values():
        if path not in loaded:
            loaded[path] = AsyncLLM(path, **keywords)
    return {name: loaded[path] for name, path in models.items()}
