"""`RequestRecord`: what the server notes about an HTTP request for its log line, its metrics and its trace span."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ferrule._params.sampling import SamplingParams
from ferrule.outputs import RequestMetrics, RequestOutput
from ferrule.server.errors import ApiError


@dataclass(frozen=True)
class PromptRecord:
    """Token counts, finish reasons and times of one prompt that has ended."""

    prompt_tokens: int | None
    """None where the client disconnected before they were known."""
    output_tokens: int
    finish_reasons: tuple[str, ...] = ()
    """Finish reason of each completion; empty for embeddings and reranking."""
    metrics: RequestMetrics | None = None
    """Times of a prompt that ran to its end."""
    params: SamplingParams | None = None
    """Sampling parameters of a generation."""

    @classmethod
    def of(cls, output: RequestOutput, params: SamplingParams) -> PromptRecord:
        """Creates the record of a finished generation."""
        metrics = output.metrics
        reasons = tuple(completion.finish_reason or "" for completion in output.outputs)
        return cls(metrics.prompt_tokens, metrics.output_tokens, reasons, metrics, params)


@dataclass
class RequestRecord:
    """Facts about one HTTP request; never its contents, nor those of the answer."""

    request_id: str
    arrival: float = field(default_factory=perf_counter)
    timeout: float | None = None
    """Seconds that the request may take from its arrival; None for no limit."""
    model: str | None = None
    prompts: list[PromptRecord] = field(default_factory=list[PromptRecord])
    """Record of each prompt that has ended."""
    begun: bool = False
    """Whether a first token has been generated."""
    fallback: str | None = None
    """Reason for which the fallback answers the request; None where this server does."""
    error: str | None = None
    """Code of the error with which the request ended."""
    error_body: Callable[[ApiError], dict[str, Any]] | None = None
    """Makes the error body of the request's API; None for OpenAI's."""
    ignored_fields: list[str] = field(default_factory=list[str])
    """Paths of unknown fields of the body that were ignored."""
    field_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of the library's fields in the request's API, where they differ."""

    @property
    def remaining(self) -> float | None:
        """Seconds until the request's deadline; None without a deadline."""
        return None if self.timeout is None else max(self.timeout - (perf_counter() - self.arrival), 0)


current_record: ContextVar[RequestRecord | None] = ContextVar("ferrule_request", default=None)
"""Record of the request that is being served."""


def name_fields(names: Mapping[str, str]) -> None:
    """Sets the request's own names of the library's fields, for its errors."""
    record = current_record.get()
    if record is not None:
        record.field_names = names
