"""What routes and guards are made with."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from ferrule.server.models import Models
from ferrule.server.settings import ServerSettings
from ferrule.server.tally import Tally


@dataclass(frozen=True)
class Context:
    """A server's models and its settings, and what it counts."""

    models: Models
    settings: ServerSettings
    registry: CollectorRegistry
    """Of metrics: each application has its own."""
    tally: Tally

    @classmethod
    def of(cls, models: Models, settings: ServerSettings) -> Context:
        """With counters that stand at zero."""
        registry = CollectorRegistry()
        return cls(models, settings, registry, Tally(settings.metrics_prefix, registry))
