"""Sampling of answers in `run`, `chat` and the chat page where neither the user nor the model sets it.

The library keeps vLLM's defaults (temperature 1 and no truncation). Small models often fail with them, and with greedy
sampling they repeat themselves.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from ferrule._api.loaded import LoadedModel
from ferrule._loading.resolve import EMBEDDED
from ferrule._params.sampling import SamplingParams

SAMPLING: dict[str, float] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Values for a model that states no temperature."""
ANSWER_TOKENS = 2048
"""Maximum number of tokens of an answer, unless the user or the model sets one."""
CONTINUATION_TOKENS = 256
"""Maximum number of tokens that continue a text, unless the user sets one."""
SEEDS = 1_000_000
"""Number of different seeds; a short one can be typed again."""


def is_greedy_toy(llm: LoadedModel) -> bool:
    """Whether a model is the embedded one, which is a toy: it continues texts, without sampling and guard."""
    return llm.info()["model"] == EMBEDDED


def with_defaults(params: SamplingParams, llm: LoadedModel, max_tokens: int = ANSWER_TOKENS) -> SamplingParams:
    """Returns parameters with a value for each of `SAMPLING`, `max_tokens` and the seed."""
    model = llm.generation_config
    changes: dict[str, Any] = {}
    if is_greedy_toy(llm):
        if params.temperature is None and model.temperature is None:
            changes["temperature"] = 0.0
    elif model.temperature is None:
        unset = [name for name in SAMPLING if getattr(params, name) is None and getattr(model, name) is None]
        changes = {name: SAMPLING[name] for name in unset}
    if params.max_tokens is None and model.max_tokens is None:
        changes["max_tokens"] = max(max_tokens, params.min_tokens)
    if params.seed is None and not is_greedy_toy(llm):
        changes["seed"] = random.randrange(SEEDS)
    return replace(params, **changes).completed(model)


def shown_defaults(params: SamplingParams, llm: LoadedModel) -> dict[str, Any]:
    """Returns the values that `with_defaults` adds, by name, without the seed."""
    full = with_defaults(params, llm)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    return {name: getattr(full, name) for name in names if getattr(params, name) is None}
