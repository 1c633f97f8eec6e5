"""Encoders: bidirectional attention and no lm_head."""

from __future__ import annotations

from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import ModelSpec


def encoder(config: Config, **switches: Any) -> ModelSpec:
    """Returns the spec of an encoder from the switches of `decoder`."""
    return decoder(config, causal=False, **switches)
