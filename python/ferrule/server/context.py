"""What every route knows: the models, the settings, and what is noted of the request that it serves."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter

from ferrule.outputs import RequestOutput
from ferrule.server.models import Models
from ferrule.server.settings import ServerSettings


@dataclass(frozen=True)
class Context:
    """What a router is made with."""

    models: Models
    settings: ServerSettings


@dataclass
class Record:
    """One HTTP request, for its line in the log, its metrics and its span. Never what was written, or asked."""

    request_id: str
    arrival: float = field(default_factory=perf_counter)
    timeout: float | None = None
    """Seconds that it may take, from its arrival."""
    model: str | None = None
    output: RequestOutput | None = None
    """With its tokens counted and its times, once it has ended."""
    error: str | None = None
    """The code of what went wrong."""


current: ContextVar[Record | None] = ContextVar("ferrule_request", default=None)
"""That of the request which is being served."""
