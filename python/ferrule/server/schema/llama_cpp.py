"""Fields of llama.cpp's requests, for every API that has them: names of sampling parameters, and rules of the others.

Parameters with the same name and meaning are not repeated here. Stages run in the order of `SamplingParams`, whatever
the order of `samplers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import InvalidParameterError
from ferrule.server.schema.base import ACCEPTED, FieldRules, Unsupported, one_of
from ferrule.server.schema.limits import StrOrList
from ferrule.server.schema.sampling import SamplingFields, sampling_field
from ferrule.server.schema.unions import StrOrObject

OTHER_FIELDS: FieldRules = {
    "adaptive_decay": ACCEPTED,
    "adaptive_target": Unsupported("there is no adaptive sampler", neutral=(-1,)),
    "backend_sampling": ACCEPTED,
    "cache_prompt": ACCEPTED,  # the prefix cache never changes a token
    "grammar_lazy": Unsupported("the grammar applies from the first token", neutral=(False,)),
    "grammar_triggers": Unsupported("the grammar applies from the first token", neutral=([],)),
    "id_slot": ACCEPTED,  # sequences have no fixed slots
    "lora": Unsupported("select an adapter by its name in model", neutral=([],)),
    "min_keep": Unsupported("filters keep at least one token", neutral=(0, 1)),
    "n_cache_reuse": ACCEPTED,
    "n_discard": ACCEPTED,  # the context is never shifted
    "n_keep": ACCEPTED,
    "speculative.n_max": ACCEPTED,  # speculative tokens never change the output
    "speculative.n_min": ACCEPTED,
    "speculative.p_min": ACCEPTED,
    "t_max_prompt_ms": Unsupported("use the header X-Request-Timeout", neutral=(0, -1)),
}
"""Fields beside those of `LlamaCppFields`."""
NATIVE_FIELDS: FieldRules = {
    "n_indent": Unsupported("use /completion", neutral=(0,)),
    "post_sampling_probs": Unsupported("use /completion", neutral=(False,)),
    "t_max_predict_ms": Unsupported("use /completion, or the header X-Request-Timeout", neutral=(0, -1)),
}
"""Fields that only llama.cpp's own routes have."""
NAMES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "n_probs": "logprobs"}
"""Names of SamplingParams for the fields that have another name."""
STRUCTURES = {"grammar": "structured_outputs.grammar", "json_schema": "structured_outputs.json"}
"""Names of the library's structured outputs for the fields that ask for them."""
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": PENALTIES,
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
"""Names of llama.cpp's samplers in its default order, with the parameters that disable them."""
LETTERS = dict(zip("edskypmxt", SAMPLERS, strict=True))
"""Samplers in the short form of the field, a letter each."""
SPELLINGS = {"typical_p": "typ_p", "typical": "typ_p", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p"}
"""Other spellings of samplers that llama.cpp accepts."""


class LlamaCppFields(SamplingFields):
    """Sampling parameters, also under llama.cpp's names."""

    repeat_penalty: float | None = sampling_field("repetition_penalty")
    repeat_last_n: int | None = None
    """Number of last tokens that penalties cover: -1, all, or 0, which disables penalties."""
    n_predict: int | None = sampling_field("max_tokens")
    n_probs: int | None = sampling_field("logprobs")
    grammar: str | None = None
    """Grammar of the output, in GBNF or Lark."""
    json_schema: StrOrObject | None = None
    """JSON schema of the output."""
    samplers: StrOrList | None = None
    """Samplers to apply; parameters of others have no effect."""
    timings_per_token: bool | None = None
    """Whether to report timings with the answer, and with each event of a stream."""
    return_progress: bool | None = None
    """Whether a stream reports the progress of the prompt, before its output."""


def max_tokens(request: LlamaCppFields, *names: str) -> int | None:
    """Returns the value of `n_predict`, whose -1 is no limit, or of a field of one of the `names`.

    Raises InvalidParameterError where the request has two of them.
    """
    found: int | None = one_of(request, *names, "n_predict")
    return None if found == -1 and request.n_predict == -1 else found


def sampling_values(request: LlamaCppFields) -> dict[str, Any]:
    """Returns the fields of SamplingParams that the request gives under llama.cpp's names, without their limits.

    Raises InvalidParameterError.
    """
    found: dict[str, Any] = {}
    penalty = one_of(request, "repetition_penalty", "repeat_penalty")
    if penalty is not None:
        found["repetition_penalty"] = penalty
    if request.repeat_last_n is not None:
        found |= _penalty_range(request, request.repeat_last_n, penalty)
    if request.samplers is not None:
        found |= _disabled(request.samplers)
    return found


def structure_of(request: LlamaCppFields) -> StructuredOutputsParams | None:
    """Returns the structure that `grammar` or `json_schema` asks for; an empty grammar is none.

    Raises InvalidParameterError.
    """
    if request.grammar and request.json_schema is not None:
        raise InvalidParameterError("json_schema", request.json_schema, "left out with grammar")
    if request.json_schema is not None:
        return StructuredOutputsParams(json=request.json_schema)
    return StructuredOutputsParams(grammar=request.grammar) if request.grammar else None


def field_names(request: LlamaCppFields) -> dict[str, str]:
    """Returns llama.cpp's names of the library's fields, where the request uses them."""
    return {library: own for own, library in (NAMES | STRUCTURES).items() if getattr(request, own) is not None}


def _penalty_range(request: LlamaCppFields, last: int, penalty: float | None) -> dict[str, float]:
    if last == 0:
        return dict(PENALTIES)
    given = {name: getattr(request, name) for name in PENALTIES} | {"repetition_penalty": penalty}
    active = [name for name, value in given.items() if value not in (None, PENALTIES[name])]
    if last != -1 and active:
        raise InvalidParameterError("repeat_last_n", last, f"-1 (all tokens) or 0 with {active[0]}")
    return {}


def _disabled(samplers: str | Sequence[str]) -> dict[str, float]:
    """Returns the parameters that disable all samplers but the given ones."""
    letters = LETTERS if isinstance(samplers, str) else {}
    names = [letters.get(name) or SPELLINGS.get(name, name) for name in samplers]
    order = list(SAMPLERS)
    for index, name in enumerate(names):
        if name not in SAMPLERS:
            raise InvalidParameterError(f"samplers[{index}]", samplers[index], f"one of {', '.join(SAMPLERS)}")
    if any(order.index(later) <= order.index(earlier) for earlier, later in pairwise(names)):
        raise InvalidParameterError("samplers", samplers, f"in the order {', '.join(SAMPLERS)}, each once")
    return {field: neutral for name in SAMPLERS if name not in names for field, neutral in SAMPLERS[name].items()}
