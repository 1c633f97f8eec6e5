"""Encoders: bidirectional attention and no lm_head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import LmHead, ModelSpec


def encoder(config: Config, **switches: Any) -> ModelSpec:
    """Returns the spec of an encoder from the switches of `decoder`."""
    return replace(decoder(config, lm_head=LmHead(tied=True), **switches), causal=False, lm_head=None)
