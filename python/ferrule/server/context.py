"""What routes and guards are made with."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule.server.models import Models
from ferrule.server.settings import ServerSettings


@dataclass(frozen=True)
class Context:
    """A server's models and its settings."""

    models: Models
    settings: ServerSettings
