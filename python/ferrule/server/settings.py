"""`ServerSettings`: limits, access control and options of the server. All access is closed by default."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from ferrule._text.parsers import DERIVED, MessageFormat
from ferrule._validation import check_integer, check_number
from ferrule.errors import InvalidParameterError

API_KEYS = "FERRULE_API_KEYS"
"""Environment variable with API keys, separated by commas. Other users of the machine can read a command line."""
AUTO = "auto"
"""Parser of the format that the chat template of the model shows."""
REJECT, WARN, IGNORE = "reject", "warn", "ignore"
QUEUE, LENGTH, MODEL, ERROR = "queue", "length", "model", "error"
REASONS = (QUEUE, LENGTH, MODEL, ERROR)
"""Reasons for which a request is sent to the fallback."""
UNKNOWN_FIELDS = (REJECT, WARN, IGNORE)
MAX_SECONDS = 1e6
"""Maximum of all times."""
MAX_KEEP_ALIVE = 1e9
"""Maximum of the time for which a model stays loaded; a longer one has no end."""
MAX_BODY = 1 << 30
MAX_STORAGE = 1 << 50
"""Maximum of sizes on disk, in bytes."""
_URL = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server.

    Raises InvalidParameterError for an invalid value.
    """

    api_keys: Sequence[str] = ()
    """Accepted API keys, as `Authorization: Bearer`, as `X-Api-Key`, or as the password of HTTP Basic, which lets a
    browser ask for it. All paths except /health require one. Without keys, no request needs one."""
    allowed_hosts: Sequence[str] = ()
    """Accepted names in the header Host besides `localhost` and IP addresses, which a foreign page cannot claim; `*`
    accepts all."""
    allowed_origins: Sequence[str] = ()
    """Origins, such as `https://example.org`, whose pages may send requests; `localhost` allows all origins of this
    machine, `*` allows all. The chat page always may."""
    max_body_bytes: int = 8 << 20
    """Maximum size of a request body, in bytes; the default fits a prompt of a million token ids."""
    body_timeout: float = 30.0
    """Seconds from the first byte of a request body to its last."""
    max_header_bytes: int = 64 << 10
    """Maximum size of the request line and headers, in bytes."""
    request_timeout: float | None = None
    """Maximum duration of a request, in seconds; None for no limit. The header `X-Request-Timeout` can lower it."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to finish when the server shuts down."""
    max_concurrent_requests: int | None = None
    """Maximum number of requests at once; None: as many as the engines run and queue."""
    keep_alive: float = 10.0
    """Seconds without an event after which a stream sends a comment that keeps the connection alive."""
    model_keep_alive: float = 300.0
    """Seconds for which an idle model that was loaded on demand stays loaded, unless a request of Ollama's API says
    otherwise; `math.inf` for no limit."""
    max_loaded_models: int | None = None
    """Maximum number of models that are loaded on demand at once; None for as many as fit into memory."""
    metrics_prefix: str = "ferrule:"
    """Prefix of the names at /metrics; `vllm:` fits dashboards for vLLM. `llamacpp:` also selects llama.cpp's names."""
    tool_call_parser: str | None = AUTO
    """Parser of tool calls; `auto` chooses it for the chat template, `template` derives it from the template itself,
    None disables tools."""
    reasoning_parser: str | None = AUTO
    """Parser of reasoning; `auto` chooses it for the chat template, `template` derives it from the template itself,
    None disables it."""
    chat_template: str | None = None
    """Jinja template that replaces the models' chat templates; None keeps them."""
    unknown_fields: str = WARN
    """Handling of unknown fields of a request: `reject` answers 400, `warn` ignores a field with a log line and the
    response header X-Ferrule-Ignored-Fields, `ignore` ignores it silently."""
    lora_dir: str | None = None
    """Directory from which adapters may be loaded while the server runs; None: none may."""
    files_dir: str | None = None
    """Directory of the files and batches of OpenAI's Batch API, which one server may use; None disables the API."""
    max_file_bytes: int = 200 << 20
    """Maximum size of an uploaded file, in bytes."""
    files_quota: int = 10 << 30
    """Maximum size of all files in `files_dir`, in bytes; a batch whose output exceeds it fails."""
    responses_db: str | None = None
    """SQLite file in which responses of OpenAI's Responses API are stored, which one server may use; None stores none
    and disables `previous_response_id` and `background`."""
    max_stored_responses: int = 1000
    """Maximum number of stored responses; the oldest ones are removed."""
    otlp_traces_endpoint: str | None = None
    """URL to which spans are sent, such as `http://localhost:4318/v1/traces`; needs `pip install ferrule[otel]`."""
    fallback_url: str | None = None
    """URL of another server with OpenAI's API, such as `https://api.openai.com/v1`, to which requests of that API are
    sent that this server cannot serve; None sends none. A request with `allow_fallback` false is never sent."""
    fallback_key: str | None = field(default=None, repr=False)
    """API key for the fallback."""
    fallback_model: str | None = None
    """Name of the model in requests to the fallback; None keeps the name of the request."""
    fallback_when: Sequence[str] = REASONS
    """Reasons: `queue` (the queue is full, or `fallback_after`), `length` (the prompt is longer than the context),
    `model` (no model has the name) and `error` (the model is not loaded or has failed)."""
    fallback_after: float | None = None
    """Seconds from the end of the request's body to its first token after which it is sent to the fallback, with the
    reason `queue`, which `fallback_when` must have; None for no limit. It is at most `keep_alive`, after which a stream
    begins with a comment."""
    ollama: bool = False
    """Whether to serve Ollama's API below `/api`."""
    tokenizer_info: bool = False
    """Whether to serve the tokenizer's configuration and the chat template at /tokenizer_info."""
    root_path: str = ""
    """Prefix of the paths that a proxy in front of the server removes, such as `/llm`. Requests may have it or not.
    An application that mounts the server must not set it."""
    slots: bool = True
    """Whether to show at /slots how many sequences run (llama.cpp's route)."""
    page: bool = True
    """Whether to serve the chat page at `/`."""

    def __post_init__(self) -> None:
        for name in ("api_keys", "allowed_hosts", "allowed_origins", "fallback_when"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        check_integer("max_body_bytes", self.max_body_bytes, 1, MAX_BODY)
        check_integer("max_file_bytes", self.max_file_bytes, 1, MAX_STORAGE)
        check_integer("files_quota", self.files_quota, 1, MAX_STORAGE)
        check_integer("max_stored_responses", self.max_stored_responses, 1, 1 << 20)
        check_integer("max_header_bytes", self.max_header_bytes, 256, 1 << 24)
        for name in ("body_timeout", "drain_timeout", "keep_alive"):
            check_number(name, getattr(self, name), 0, MAX_SECONDS)
        if self.model_keep_alive != math.inf:
            check_number("model_keep_alive", self.model_keep_alive, 0, MAX_KEEP_ALIVE)
        if self.max_loaded_models is not None:
            check_integer("max_loaded_models", self.max_loaded_models, 1, 1 << 20)
        if self.request_timeout is not None:
            check_number("request_timeout", self.request_timeout, 0, MAX_SECONDS, above_low=True)
        if self.max_concurrent_requests is not None:
            check_integer("max_concurrent_requests", self.max_concurrent_requests, 1, 1 << 20)
        self._check_fallback()
        # Raises for unknown parsers.
        named = [None if name in (AUTO, DERIVED) else name for name in (self.tool_call_parser, self.reasoning_parser)]
        MessageFormat(*named)
        if self.unknown_fields not in UNKNOWN_FIELDS:
            raise InvalidParameterError("unknown_fields", self.unknown_fields, f"one of {', '.join(UNKNOWN_FIELDS)}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidParameterError("root_path", self.root_path, "a path such as /llm, without a slash at its end")
        if _PREFIX.fullmatch(self.metrics_prefix) is None:
            limit = "letters, digits, _ and :, not beginning with a digit"
            raise InvalidParameterError("metrics_prefix", self.metrics_prefix, limit)

    def _check_fallback(self) -> None:
        if self.fallback_url is not None and _URL.fullmatch(self.fallback_url) is None:
            raise InvalidParameterError("fallback_url", self.fallback_url, "a URL such as https://example.org/v1")
        for reason in self.fallback_when:
            if reason not in REASONS:
                raise InvalidParameterError("fallback_when", reason, f"one of {', '.join(REASONS)}")
        if self.fallback_after is not None:
            check_number("fallback_after", self.fallback_after, 0, MAX_SECONDS, above_low=True)
            if QUEUE not in self.fallback_when:
                limit = f"unset where fallback_when does not have {QUEUE}"
                raise InvalidParameterError("fallback_after", self.fallback_after, limit)
            if 0 < self.keep_alive < self.fallback_after:
                limit = f"at most keep_alive ({self.keep_alive:g}), after which a stream begins"
                raise InvalidParameterError("fallback_after", self.fallback_after, limit)


def environment_api_keys() -> tuple[str, ...]:
    """Returns the API keys of the environment variable FERRULE_API_KEYS."""
    return tuple(filter(None, os.environ.get(API_KEYS, "").split(",")))


def _strings(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        # The value may be a secret.
        raise InvalidParameterError(name, type(given), "a list of strings")
    for index, each in enumerate(cast("Sequence[object]", given)):
        if not isinstance(each, str) or not each or each.strip() != each:
            limit = "a non-empty string without surrounding white space"
            raise InvalidParameterError(f"{name}[{index}]", type(each), limit)
    return tuple(cast("Sequence[str]", given))
