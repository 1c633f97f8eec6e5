"""`ferrule serve`: models over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ferrule._cli.help import Command, options
from ferrule._cli.model import (
    engine_rows,
    loading,
    model_options,
    pipeline_options,
    prefix_cache_option,
    speculative_options,
)
from ferrule._cli.parent_process import PARENT_PID
from ferrule._cli.served_models import load_models, models_by_name, on_demand_models, pair
from ferrule._cli.status import StatusLine
from ferrule._params.options import MAX_QUEUED_REQUESTS

if TYPE_CHECKING:
    from ferrule.server import ServerSettings

SETTINGS = (
    *("api_keys", "allowed_hosts", "allowed_origins", "max_body_bytes", "request_timeout", "drain_timeout"),
    *("max_concurrent_requests", "metrics_prefix", "tool_call_parser", "reasoning_parser", "lora_dir"),
    *("otlp_traces_endpoint", "ollama", "page", "chat_template", "unknown_fields", "tokenizer_info", "root_path"),
    *("model_keep_alive", "max_loaded_models"),
    *("fallback_url", "fallback_model", "fallback_when", "fallback_after"),
    *("slots", "files_dir", "max_file_bytes", "files_quota", "responses_db", "max_stored_responses"),
)
"""Options that are fields of ServerSettings, which has their defaults."""


@click.command(
    "serve",
    cls=Command,
    examples=[
        ("The small model that ships with ferrule, at http://127.0.0.1:8000", "ferrule serve"),
        ("A model of the hub, with an API key", "ferrule serve Qwen/Qwen3-0.6B --port 8080 --api-key secret"),
        ("A model under the name of a cloud model", "ferrule serve ./my-model --served-model-name gpt-4o-mini"),
        ("Two models", "ferrule serve --model small=./model-a --model large=./model-b"),
        ("Four servers on the hosts of a Ray cluster", "ferrule serve Qwen/Qwen3-0.6B --ray auto --num-replicas 4"),
    ],
)
@click.argument("model", required=False)
@options(
    "Models",
    [
        (
            ("--served-model-name", "served_model_names"),
            {
                "multiple": True,
                "metavar": "NAME",
                "help": "Name of MODEL in requests (default: MODEL, of a path its last part). May be repeated.",
            },
        ),
        (
            ("--model", "aliases"),
            {
                "multiple": True,
                "metavar": "NAME=MODEL",
                "help": "Further model with its name in requests, loaded when a request first needs it, or with --ray "
                "at the start. May be repeated; the first model serves requests without a model name.",
            },
        ),
        (
            ("--model-keep-alive",),
            {
                "metavar": "TIME",
                "help": "Time for which an idle model of --model stays loaded: seconds, or a duration such as 1h30m; "
                "-1 for no limit (default 5m).",
            },
        ),
        (
            ("--max-loaded-models",),
            {
                "type": int,
                "help": "Maximum number of models of --model that are loaded at once; the least recently used one is "
                "unloaded (default: as many as fit into memory).",
            },
        ),
        (
            ("--lora-modules",),
            {
                "multiple": True,
                "metavar": "NAME=PATH",
                "help": "LoRA adapter with its name in requests (default: none). May be repeated.",
            },
        ),
        (
            ("--lora-dir",),
            {
                "type": click.Path(exists=True, file_okay=False),
                "help": "Directory from which adapters may be loaded over HTTP (default: loading is disabled).",
            },
        ),
        (
            ("--chat-template",),
            {
                "metavar": "FILE|TEMPLATE",
                "help": "Chat template in Jinja, as a file or as text (default: the model's).",
            },
        ),
        (
            ("--tool-call-parser",),
            {
                "metavar": "NAME",
                "help": "Parser of tool calls: auto, template, or a name (default auto: the one made for the chat "
                "template, else derived from it).",
            },
        ),
        (
            ("--reasoning-parser",),
            {
                "metavar": "NAME",
                "help": "Parser of reasoning: auto, template, or a name (default auto: the one made for the chat "
                "template, else derived from it).",
            },
        ),
    ],
)
@options(
    "HTTP",
    [
        (("--host",), {"default": "127.0.0.1", "help": "Address to listen on (default 127.0.0.1)."}),
        (
            ("--port",),
            {"type": click.IntRange(0, 65535), "default": 8000, "help": "Port; 0 chooses a free one (default 8000)."},
        ),
        (
            ("--uds",),
            {"metavar": "PATH", "help": "Unix socket to listen on instead of --host and --port (default: none)."},
        ),
        (
            ("--ssl-keyfile",),
            {"metavar": "FILE", "help": "Private key for TLS, in PEM (default: that in --ssl-certfile)."},
        ),
        (
            ("--ssl-certfile",),
            {"metavar": "FILE", "help": "Certificate for TLS, in PEM (default: none, plain HTTP)."},
        ),
        (
            ("--ssl-ca-certs",),
            {
                "metavar": "FILE",
                "help": "Certificates of the authorities that sign the certificates of clients, in PEM, which clients "
                "must then have (default: none).",
            },
        ),
        (
            ("--root-path",),
            {"metavar": "PATH", "help": "Prefix of paths that a proxy in front of the server removes (default: none)."},
        ),
        (
            ("--enable-tokenizer-info-endpoint", "tokenizer_info"),
            {"is_flag": True, "help": "Serve the special tokens and the chat template at /tokenizer_info."},
        ),
        (
            ("--api-key", "api_keys"),
            {
                "multiple": True,
                "help": "API key that requests must send (default: $FERRULE_API_KEYS, else none). May be repeated.",
            },
        ),
        (
            ("--allowed-host", "allowed_hosts"),
            {
                "multiple": True,
                "metavar": "NAME",
                "help": "Accepted Host header; * accepts all (default: localhost and IP addresses). May be repeated.",
            },
        ),
        (
            ("--allowed-origin", "allowed_origins"),
            {
                "multiple": True,
                "metavar": "URL",
                "help": "Origin whose pages may send requests; localhost allows all of this machine, * allows all "
                "(default: the chat page). May be repeated.",
            },
        ),
        (
            ("--unknown-fields",),
            {
                "type": click.Choice(("reject", "warn", "ignore")),
                "help": "Handling of unknown fields in requests: reject answers 400, warn logs and names them in a "
                "response header, ignore does nothing (default warn).",
            },
        ),
        (("--ollama/--no-ollama",), {"default": True, "help": "Serve Ollama's API below /api (default: serve it)."}),
        (
            ("--no-slots", "slots"),
            {"flag_value": False, "default": True, "help": "Do not show at /slots how many sequences run."},
        ),
        (("--no-page", "page"), {"flag_value": False, "default": True, "help": "Do not serve the chat page at /."}),
    ],
)
@options(
    "Limits and shutdown",
    [
        *engine_rows("max_num_seqs"),
        *engine_rows("max_queued_requests", unset=f"{MAX_QUEUED_REQUESTS}; further requests get 503"),
        (
            ("--max-concurrent-requests",),
            {"type": int, "help": "Maximum number of requests at once (default: running and queued sequences)."},
        ),
        (("--max-body-bytes",), {"type": int, "help": "Maximum size of a request body in bytes (default 8388608)."}),
        (
            ("--request-timeout",),
            {"type": float, "metavar": "SECONDS", "help": "Maximum duration of a request (default: unlimited)."},
        ),
        (
            ("--drain-timeout",),
            {
                "type": float,
                "metavar": "SECONDS",
                "help": "Time that running requests have to finish after SIGTERM (default 30).",
            },
        ),
        (
            ("--exit-with-parent",),
            {"is_flag": True, "help": "Shut down when the parent process exits."},
        ),
    ],
)
@options(
    "Fallback",
    [
        (
            ("--fallback-url",),
            {
                "metavar": "URL",
                "help": "URL of another server with OpenAI's API, such as https://api.openai.com/v1, to which requests "
                "are sent that this server cannot serve (default: none).",
            },
        ),
        (
            ("--fallback-key-env",),
            {"metavar": "NAME", "help": "Environment variable with the API key for the fallback (default: none)."},
        ),
        (
            ("--fallback-model",),
            {"metavar": "NAME", "help": "Name of the model in requests to the fallback (default: the request's)."},
        ),
        (
            ("--fallback-when",),
            {
                "type": click.Choice(("queue", "length", "model", "error")),
                "multiple": True,
                "help": "Reason to use the fallback: queue (full, or --fallback-after), length (the prompt exceeds the "
                "context), model (no model has the name), error (the model is not loaded or has failed) (default: "
                "all). May be repeated.",
            },
        ),
        (
            ("--fallback-after",),
            {
                "type": float,
                "metavar": "SECONDS",
                "help": "Time to the first token, at most 10, after which a request is sent to the fallback for the "
                "reason queue (default: unlimited).",
            },
        ),
    ],
)
@options(
    "Storage",
    [
        (
            ("--files-dir",),
            {
                "metavar": "DIR",
                "help": "Directory of the files and batches of OpenAI's Batch API (default: the API is disabled).",
            },
        ),
        (
            ("--max-file-bytes",),
            {"type": int, "help": "Maximum size of an uploaded file in bytes (default 209715200)."},
        ),
        (
            ("--files-quota",),
            {"type": int, "metavar": "BYTES", "help": "Maximum size of all files in bytes (default 10737418240)."},
        ),
        (
            ("--responses-db",),
            {
                "metavar": "FILE",
                "help": "SQLite file that stores responses of OpenAI's Responses API, for previous_response_id and "
                "background (default: nothing is stored).",
            },
        ),
        (
            ("--max-stored-responses",),
            {"type": int, "help": "Maximum number of stored responses; the oldest are removed (default 1000)."},
        ),
    ],
)
@options(
    "Ray",
    [
        (
            ("--ray",),
            {
                "metavar": "ADDRESS",
                "help": "Serve with replicas on the hosts of a Ray cluster: HOST:PORT, auto, or local (default: in "
                "this process).",
            },
        ),
        (
            ("--num-replicas",),
            {
                "type": click.IntRange(1),
                "metavar": "N",
                "help": "Number of replicas of each model with --ray; each has --threads threads (default 1, as is "
                "--threads then).",
            },
        ),
    ],
)
@options(
    "Observability",
    [
        (
            ("--log-format",),
            {
                "type": click.Choice(("auto", "text", "json")),
                "default": "auto",
                "help": "Format of the log on stderr; auto is text on a terminal and JSON lines elsewhere "
                "(default auto).",
            },
        ),
        (
            ("--metrics-prefix",),
            {
                "help": "Prefix of the names at /metrics; vllm: fits vLLM's dashboards, llamacpp: llama.cpp's "
                "(default ferrule:)."
            },
        ),
        (
            ("--otlp-traces-endpoint",),
            {"metavar": "URL", "help": "Endpoint for OpenTelemetry spans of requests (default: none)."},
        ),
    ],
)
@model_options
@pipeline_options
@prefix_cache_option
@speculative_options
def command(
    *,
    model: str | None,
    aliases: Sequence[str],
    served_model_names: Sequence[str],
    host: str,
    port: int,
    uds: str | None,
    ssl_keyfile: str | None,
    ssl_certfile: str | None,
    ssl_ca_certs: str | None,
    lora_modules: Sequence[str],
    fallback_key_env: str | None,
    exit_with_parent: bool,
    log_format: str,
    ray: str | None,
    num_replicas: int | None,
    **options: Any,
) -> None:
    """Serve MODEL (default: the small model that ships with ferrule) over HTTP, with a chat page at /.

    The APIs are OpenAI's, Anthropic's and Ollama's.
    """
    quiet = log_format == "json"
    with _interrupts_deferred(), StatusLine("starting the server", quiet=quiet):
        models = models_by_name(model, served_model_names, aliases)
        unsupported = {
            "uds": uds,
            "ssl-certfile": ssl_certfile,
            "ssl-keyfile": ssl_keyfile,
            "ssl-ca-certs": ssl_ca_certs,
            "exit-with-parent": exit_with_parent,
            "model-keep-alive": options["model_keep_alive"],
            "max-loaded-models": options["max_loaded_models"],
            "pipeline-parallel-size": options["pipeline_parallel_size"],
            "tensor-parallel-size": options["tensor_parallel_size"],
            "distributed-executor-backend": options["distributed_executor_backend"],
        }
        options["chat_template"] = _chat_template(options["chat_template"])
        settings = _settings(options, fallback_key_env)
        adapters = dict(pair("--lora-modules", module, "NAME=PATH") for module in lora_modules)
        keywords = loading({name: value for name, value in options.items() if value is not None})
        if adapters:
            keywords["lora_modules"] = adapters
        from ferrule._cli.server_log import banner, log_to_stderr
        from ferrule.server import serve
        from ferrule.server.middleware.log import LOGGER
        from ferrule.server.residency import resident_bytes
        from ferrule.server.tls import tls_context

    if ray is not None:
        for option, value in unsupported.items():
            if value not in (None, False, ()):
                raise click.UsageError(f"--{option} is not supported with --ray")
        _serve_on_ray(ray, models, settings, keywords, num_replicas, host=host, port=port, log_format=log_format)
        return
    if num_replicas is not None:
        raise click.UsageError("--num-replicas requires --ray")

    urls: list[str] = []

    def started(url: str) -> None:
        urls.append(url)
        if readable:
            return print(f"loading {', '.join(models)} for {url}", file=sys.stderr)
        return LOGGER.info("listening", extra={"fields": {"url": url, "models": list(models)}})

    def ready() -> None:
        if readable:
            print(banner(urls[0], list(models), settings, resident_bytes()), file=sys.stderr)

    try:
        tls = tls_context(ssl_certfile, ssl_keyfile, ssl_ca_certs)
        with log_to_stderr(log_format) as readable:
            serve(
                lambda: load_models(
                    models, keywords, settings, on_demand=on_demand_models(model, aliases), quiet=quiet
                ),
                settings,
                host=host,
                port=port,
                uds=uds,
                tls=tls,
                on_listening=started,
                on_ready=ready,
                parent=PARENT_PID if exit_with_parent else None,
            )
    except OSError as error:
        if error.errno is None:  # an error of ferrule, such as ModelFileError, and not of the network
            raise
        raise click.UsageError(f"{uds or f'{host}:{port}'}: {error.strerror}") from error


def _serve_on_ray(
    address: str,
    models: Mapping[str, str | None],
    settings: ServerSettings,
    keywords: dict[str, Any],
    num_replicas: int | None,
    *,
    host: str,
    port: int,
    log_format: str,
) -> None:
    """Serves models with replicas on a Ray cluster; `keywords` are arguments of the engines.

    Raises click.UsageError, and as `build_app` and `run_app`.
    """
    if port == 0:
        raise click.UsageError("--port must be from 1 to 65535 with --ray, got 0")
    with StatusLine(f"starting replicas on the Ray cluster {address}", quiet=log_format == "json") as status:
        from ferrule._cli.server_log import banner, log_to_stderr
        from ferrule.ray import build_app

        threads = keywords.pop("threads", None)
        app = build_app(
            models=models,
            num_replicas=num_replicas,
            num_cpus=1 if threads is None else threads,
            settings=settings,
            **keywords,
        )
        from ferrule.ray.running import run_app  # `build_app` reports a missing Ray Serve

        def ready(url: str) -> None:
            status.clear()
            if readable:
                print(banner(url, list(models), settings, None), file=sys.stderr)

        with log_to_stderr(log_format) as readable:
            run_app(address, app, host=host, port=port, on_ready=ready)


@contextmanager
def _interrupts_deferred() -> Generator[None]:
    """Defers KeyboardInterrupt to the end of the context; during imports, Python would ignore it in some places."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set and run handlers
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def _chat_template(given: str | None) -> str | None:
    """Returns a chat template that is given as a file or as text; text is recognized by a brace or a line break.

    Raises click.UsageError.
    """
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--chat-template: cannot read {given}: {error}") from None


def _settings(options: dict[str, Any], fallback_key_env: str | None) -> ServerSettings:
    """Removes the settings of the server from the options and returns them.

    Raises InvalidParameterError; click.UsageError where the server is not installed.
    """
    try:
        from ferrule.server import ServerSettings
        from ferrule.server.settings import environment_api_keys
    except ModuleNotFoundError as error:
        raise click.UsageError(f"the server requires {error.name}: pip install 'ferrule[server]'") from error
    given = {name: options.pop(name) for name in SETTINGS}
    if given["model_keep_alive"] is not None:
        given["model_keep_alive"] = _keep_alive(given["model_keep_alive"])
    given["api_keys"] = (*given["api_keys"], *environment_api_keys())
    given["fallback_when"] = given["fallback_when"] or None
    if fallback_key_env is not None:
        given["fallback_key"] = os.environ.get(fallback_key_env)
        if not given["fallback_key"]:
            raise click.UsageError(f"--fallback-key-env: the environment variable {fallback_key_env} is not set")
    return ServerSettings(**{name: value for name, value in given.items() if value is not None})


def _keep_alive(given: str) -> float:
    """Returns the number of seconds of a duration, as in Ollama's API.

    Raises click.UsageError.
    """
    from pydantic import TypeAdapter, ValidationError

    from ferrule.server.schema.duration import Duration, seconds

    try:
        return seconds(TypeAdapter[float | str](Duration).validate_python(given))
    except ValidationError as error:
        raise click.UsageError(f"--model-keep-alive {error.errors()[0]['msg']}") from None
