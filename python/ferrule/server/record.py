"""What is noted of a request while it is served: for its line in the log, its metrics and its span."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ferrule.outputs import RequestOutput

if TYPE_CHECKING:
    from ferrule.server.errors import ApiError


@dataclass
class Record:
    """One HTTP request. Never what was asked, or written."""

    request_id: str
    arrival: float = field(default_factory=perf_counter)
    timeout: float | None = None
    """Seconds that it may take from its arrival; None for no limit."""
    model: str | None = None
    outputs: list[RequestOutput] = field(default_factory=list[RequestOutput])
    """Of each prompt that has ended: its tokens are counted, and its times."""
    error: str | None = None
    """The code of what went wrong."""
    error_body: Callable[[ApiError], dict[str, Any]] | None = None
    """The form that errors have in the API that was asked; None for OpenAI's."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the request calls fields that the library calls otherwise."""

    @property
    def left(self) -> float | None:
        """Seconds that it still has."""
        return None if self.timeout is None else max(self.timeout - (perf_counter() - self.arrival), 0)


current: ContextVar[Record | None] = ContextVar("ferrule_request", default=None)
"""That of the request which is being served."""
