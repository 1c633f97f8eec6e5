"""What routes and guards are made with."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from ferrule.server.counters import RequestCounters
from ferrule.server.models import Models
from ferrule.server.settings import ServerSettings
from ferrule.server.tracing import Tracing


@dataclass(frozen=True)
class Context:
    """A server's models and its settings, and what it counts."""

    models: Models
    settings: ServerSettings
    registry: CollectorRegistry
    """Of metrics: each application has its own."""
    counters: RequestCounters
    tracing: Tracing | None
    """Where spans go; None where they go nowhere."""

    @classmethod
    def of(cls, models: Models, settings: ServerSettings) -> Context:
        """With counters that stand at zero.

        Raises InvalidParameterError where spans are wanted and OpenTelemetry is not installed.
        """
        registry = CollectorRegistry()
        tracing = Tracing.to(settings.otlp_traces_endpoint)
        return cls(models, settings, registry, RequestCounters(settings.metrics_prefix, registry), tracing)
