"""Beam search in completions and chat completions (vLLM's fields)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ferrule._engine.beams import BeamSearchParams
from ferrule._params.sampling import SamplingParams
from ferrule.errors import InvalidParameterError
from ferrule.server.models import ServedModel
from ferrule.server.openai.protocol.generation import GenerationFields

SEARCH_FIELDS = frozenset(field.name for field in fields(BeamSearchParams))
WITHOUT_EFFECT = frozenset({"seed", "prediction"})
"""Parameters that cannot change the result of a beam search."""


def beam_search_of(served: ServedModel, request: GenerationFields, params: SamplingParams) -> BeamSearchParams | None:
    """Returns the beam search that a request asks for; None for sampling.

    There are `best_of` beams, by default `n`, of which the `n` best are returned.

    Raises InvalidParameterError for a parameter of one that does not apply to the other.
    """
    search: dict[str, Any] = {"length_penalty": request.length_penalty, "early_stopping": request.early_stopping}
    own = {name: value for name, value in search.items() if value is not None}
    if not request.use_beam_search:
        for name, value in own.items():
            if value != BeamSearchParams.__dataclass_fields__[name].default:
                raise InvalidParameterError(name, value, "left out unless use_beam_search is true")
        return None
    given = {name: value for name, value in params.given().items() if name not in WITHOUT_EFFECT}
    width = given.pop("best_of", None) or params.n
    for name, value in given.items():
        if name not in SEARCH_FIELDS:
            raise InvalidParameterError(name, value, "left out with use_beam_search")
    search = {"max_tokens": served.info["max_model_len"], **given, **own, "n": params.n, "beam_width": width}
    return BeamSearchParams(**search)
