"""What is noted of a request while it is served: for its line in the log, its metrics and its span."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ferrule.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from ferrule.server.errors import ApiError


@dataclass(frozen=True)
class Counted:
    """What is counted of a prompt whose work has ended."""

    prompt_tokens: int | None
    """None where it is not known, as the client went before."""
    output_tokens: int
    finish_reasons: tuple[str, ...] = ()
    """Of its completions; none of a text that was only read."""
    metrics: RequestMetrics | None = None
    """Its times, of a prompt that was continued to an end."""

    @classmethod
    def of(cls, output: RequestOutput) -> Counted:
        """That of a prompt which was continued."""
        metrics = output.metrics
        reasons = tuple(completion.finish_reason or "" for completion in output.outputs)
        return cls(metrics.prompt_tokens, metrics.output_tokens, reasons, metrics)


@dataclass
class Record:
    """One HTTP request. Never what was asked, or written."""

    request_id: str
    arrival: float = field(default_factory=perf_counter)
    timeout: float | None = None
    """Seconds that it may take from its arrival; None for no limit."""
    model: str | None = None
    counted: list[Counted] = field(default_factory=list[Counted])
    """Of each prompt that has ended."""
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
