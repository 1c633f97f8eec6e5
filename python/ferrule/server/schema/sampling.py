"""Sampling parameters of requests: OpenAI's, and all others of `SamplingParams`.

Types are validated here; bounds and combinations by `SamplingParams`, whose errors name the field.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from ferrule._params.sampling import SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import InvalidParameterError
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedDict, BoundedList, StrOrList, TokenIds
from ferrule.server.schema.unions import StrOrObject, str_list_or_object


class StructuredOutputs(RequestModel):
    """Structure of the output, with vLLM's fields."""

    json_schema: StrOrObject | None = Field(None, alias="json")
    regex: str | None = None
    choice: BoundedList[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StrOrObject | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def params(self) -> StructuredOutputsParams:
        """Converts the field to the library's parameter.

        Raises InvalidParameterError.
        """
        return StructuredOutputsParams(**self.model_dump(by_alias=True))


Bias = Annotated[
    BoundedDict[float],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


class SamplingFields(RequestModel):
    """Sampling parameters; the model's generation_config.json provides the defaults."""

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_h: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: StrOrList | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words: StrOrList | None = None
    bad_words_ids: BoundedList[TokenIds] | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: Bias | None = None
    seed: int | None = None
    stop: StrOrList | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: (
        Annotated[
            Annotated[str, Tag("<str>")]
            | Annotated[TokenIds, Tag("<list>")]
            | Annotated[dict[str, Any], Tag("<object>")],
            Discriminator(str_list_or_object),
        ]
        | None
    ) = None


NOT_IN_REQUESTS = frozenset({"max_tokens", "logprobs", "entropy", "logits_processors", "detokenize", "output_kind"})
"""Fields of SamplingParams that requests do not have: each API has its own names of the first two, functions cannot be
sent over HTTP, and the rest concerns callers in Python."""


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structure: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Converts the sampling parameters of a request; `structure` is the structure of the output, from any field.

    Raises InvalidParameterError.
    """
    values = {name: getattr(request, name) for name in SamplingFields.model_fields}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in request.logit_bias.items()}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "structured_outputs": structure}
    return SamplingParams.with_model_defaults(**given)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidParameterError("logit_bias", key, "an object whose keys are token ids")
    return int(key)
