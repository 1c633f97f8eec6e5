"""What encoders have in common: a token sees those after it too, and there is no head to continue a text with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Head, ModelSpec


def encoder(config: Config, **switches: Any) -> ModelSpec:
    """A spec from the switches that `decoder` takes."""
    return replace(decoder(config, head=Head(tied=True), **switches), causal=False, head=None)
