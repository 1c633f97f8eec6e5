"""How the server guards itself and what it shows: everything closed unless it is opened here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ferrule._text.parsers import MessageFormat
from ferrule._validation import check_integer, check_number, shown
from ferrule.errors import InvalidParameterError

AUTO = "auto"
"""The parser that a model's chat template tells."""
MAX_SECONDS = 1e6
"""Limit of times."""
MAX_BODY = 1 << 30
_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What requests must bring, how large and how slow they may be, and what the server tells of itself.

    Raises InvalidParameterError for a value outside its limits.
    """

    api_keys: Sequence[str] = ()
    """Any of them lets a request in, as `Authorization: Bearer`, as `X-Api-Key`, or as the password of HTTP Basic,
    which lets a browser ask for it. Every path but /health wants one. Without any, none is asked for."""
    allowed_hosts: Sequence[str] = ()
    """Names in the header Host beside `localhost` and plain addresses, which no foreign page can make its own; `*`
    allows all."""
    allowed_origins: Sequence[str] = ()
    """Origins, such as `https://example.org`, whose pages may ask this server; `*` allows all. Its own page may."""
    max_body_bytes: int = 8 << 20
    """Of a request; a prompt of a million token ids fits."""
    body_timeout: float = 30.0
    """Seconds until all of a request must be there, from its first byte."""
    max_header_bytes: int = 64 << 10
    request_timeout: float | None = None
    """Seconds that a request may take in all; None for no limit. A request can ask for less: `X-Request-Timeout`."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to end once the server is told to."""
    max_concurrent_requests: int | None = None
    """Requests inside at once; None: as many as the engines run and let wait."""
    keep_alive: float = 10.0
    """Seconds of silence in a stream after which a comment shows that it lives."""
    metrics_prefix: str = "ferrule:"
    """Of the names at /metrics; `vllm:` fits dashboards that know vLLM's."""
    tool_call_parser: str | None = AUTO
    """How models write tool calls: a parser's name, what the chat template tells, or None for no tools."""
    reasoning_parser: str | None = AUTO
    """Likewise, for reasoning."""
    lora_dir: str | None = None
    """The directory below which adapters may be loaded while the server runs; None: none may."""
    otlp_traces_endpoint: str | None = None
    """Where spans go, such as `http://localhost:4318/v1/traces`; needs `pip install ferrule[otel]`."""
    ollama: bool = False
    """Whether Ollama's API is served too, below `/api`."""
    page: bool = True
    """Whether the chat page is served at `/`."""

    def __post_init__(self) -> None:
        for name in ("api_keys", "allowed_hosts", "allowed_origins"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        check_integer("max_body_bytes", self.max_body_bytes, 1, MAX_BODY)
        check_integer("max_header_bytes", self.max_header_bytes, 256, 1 << 24)
        for name in ("body_timeout", "drain_timeout", "keep_alive"):
            check_number(name, getattr(self, name), 0, MAX_SECONDS)
        if self.request_timeout is not None:
            check_number("request_timeout", self.request_timeout, 0, MAX_SECONDS, above_low=True)
        if self.max_concurrent_requests is not None:
            check_integer("max_concurrent_requests", self.max_concurrent_requests, 1, 1 << 20)
        # Names that no parser has.
        MessageFormat(*(None if name == AUTO else name for name in (self.tool_call_parser, self.reasoning_parser)))
        if _PREFIX.fullmatch(self.metrics_prefix) is None:
            limit = "letters, digits, _ and :, not beginning with a digit"
            raise InvalidParameterError(f"metrics_prefix is {shown(self.metrics_prefix)}; it must be {limit}")


def _strings(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidParameterError(
            f"{name} is {'a string' if isinstance(given, str) else shown(given)}; it must be a list of strings"
        )
    for index, each in enumerate(cast("Sequence[object]", given)):
        if not isinstance(each, str) or not each or each.strip() != each:
            # Its value may be a secret.
            raise InvalidParameterError(f"{name}[{index}] must be a string that is not empty and has no space around")
    return tuple(cast("Sequence[str]", given))
