"""Sampling parameters of requests, generated from the declaration of `SamplingParams`.

Types are validated here; bounds and combinations by `SamplingParams`, whose errors name the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, JsonValue, Tag, WithJsonSchema, create_model

from ferrule._params.declaration import Bounds, Integer, Number, Parameter, parameters
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


Prediction = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[TokenIds, Tag("<list>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(str_list_or_object),
]
JSON_TYPES: dict[object, Any] = {
    str | Sequence[str] | None: StrOrList,
    Sequence[int] | None: TokenIds,
    Sequence[Sequence[int]] | None: BoundedList[TokenIds],
    Mapping[int, float] | None: Bias,
    StructuredOutputsParams | None: StructuredOutputs,
    str | Sequence[int] | Mapping[str, Any] | None: Prediction,
}
"""JSON forms of parameter types; other types are the same in JSON."""
NOT_IN_REQUESTS = frozenset({"max_tokens", "logprobs", "entropy", "logits_processors", "detokenize", "output_kind"})
"""Fields of SamplingParams that requests do not have: each API has its own names of the first two, functions cannot be
sent over HTTP, and the rest concerns callers in Python."""


def sampling_field(name: str) -> Any:
    """Returns an optional field with the description and the bounds of a parameter of `SamplingParams`.

    The bounds are those of the schema: `SamplingParams` checks the values.
    """
    parameter = parameters(SamplingParams)[name]
    return Field(None, description=parameter.doc, json_schema_extra=_schema_of(parameter.bounds))


def _schema_of(bounds: Bounds | None) -> dict[str, JsonValue]:
    match bounds:
        case Integer(low, high):
            return {"minimum": low, "maximum": high}
        case Number(low, high, above_low):
            return {"exclusiveMinimum" if above_low else "minimum": low, "maximum": high}
        case _:
            return {}


def _type_of(parameter: Parameter) -> Any:
    optional = parameter.type | None
    return JSON_TYPES.get(optional, optional) | None


if TYPE_CHECKING:

    class SamplingFields(RequestModel):
        """Fields of the generated model that the server reads one by one."""

        n: int | None
        best_of: int | None
        bad_words_ids: list[list[int]] | None
        temperature: float | None
        top_p: float | None
        logit_bias: dict[str, float] | None
        prompt_logprobs: int | None
        structured_outputs: StructuredOutputs | None
        prediction: str | list[int] | dict[str, Any] | None

else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=RequestModel,
        __module__=__name__,
        __doc__="Sampling parameters; the model's generation_config.json provides the defaults.",
        **{
            name: (_type_of(parameter), sampling_field(name))
            for name, parameter in parameters(SamplingParams).items()
            if name not in NOT_IN_REQUESTS
        },
    )


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structure: StructuredOutputsParams | None = None,
    others: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Converts the sampling parameters of a request.

    `structure` is the structure of the output, from any field; `others` are parameters from fields with other names.

    Raises InvalidParameterError.
    """
    values = {name: getattr(request, name) for name in SamplingFields.model_fields}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in request.logit_bias.items()}
    given |= {**(others or {}), "max_tokens": max_tokens, "logprobs": logprobs, "structured_outputs": structure}
    return SamplingParams.with_model_defaults(**given)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidParameterError("logit_bias", key, "an object whose keys are token ids")
    return int(key)
