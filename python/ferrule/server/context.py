"""`Context`: the objects that routes and middleware share."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from ferrule.server.counters import RequestCounters
from ferrule.server.fallback import Fallback
from ferrule.server.leases import keep
from ferrule.server.models import Models, ServedModel
from ferrule.server.settings import ServerSettings
from ferrule.server.tracing import Tracing


@dataclass
class ServerLoad:
    """Number of requests with a body that a server has in progress; GET requests are not counted."""

    uploading: int = 0
    """Requests whose bodies are being received."""
    running: int = 0
    """Requests whose bodies are complete."""


@dataclass(frozen=True)
class Context:
    """Models, settings, counters and tracing of a server."""

    models: Models
    settings: ServerSettings
    registry: CollectorRegistry
    """Registry of metrics; each application has its own."""
    counters: RequestCounters
    tracing: Tracing | None
    """Exporter of spans; None without tracing."""
    fallback: Fallback | None = None
    """Server for requests that this one cannot serve; None without one."""
    load: ServerLoad = field(default_factory=ServerLoad)

    @classmethod
    def of(cls, models: Models, settings: ServerSettings) -> Context:
        """Creates a context with new counters, and applies the settings of loading to the models.

        Raises InvalidParameterError where tracing is configured and OpenTelemetry is not installed.
        """
        models.residency.keep_alive = settings.model_keep_alive
        models.residency.max_loaded = settings.max_loaded_models
        registry = CollectorRegistry()
        tracing = Tracing.to(settings.otlp_traces_endpoint)
        counters = RequestCounters(settings.metrics_prefix, registry)
        fallback = None if settings.fallback_url is None else Fallback(settings)
        return cls(models, settings, registry, counters, tracing, fallback)

    async def lease(self, name: str | None, keep_alive: float | None = None) -> ServedModel:
        """Returns the model of a name, which stays loaded until the current request has ended, and is loaded first.

        Raises as `Models.lease`.
        """
        return await keep(self.models.lease(name, keep_alive))
