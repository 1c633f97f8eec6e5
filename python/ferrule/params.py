"""What a request may ask of the sampler: vLLM's names, checked when the object is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from ferrule.checks import check_number, check_whole, shown
from ferrule.errors import InvalidParameterError
from ferrule.speculative import check_prediction
from ferrule.structured import StructuredOutputsParams

MAX_COUNT = 2**31 - 1
"""Limit of counts of tokens: no context is longer."""
MAX_N = 128
"""Completions of one prompt."""
MAX_LOGPROBS = 20
"""Alternatives reported for a token, as in OpenAI's API."""
MAX_STOP = 256
"""Stop strings of a request."""
MAX_STOP_LENGTH = 4096
"""Characters of a stop string."""
MAX_STOP_TOKEN_IDS = 1024
"""Stop tokens of a request."""
MAX_TOKEN_ID = 2**32 - 1

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1

STANDARD = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": None,
}
"""Values of the fields that neither the caller nor the model's generation_config.json sets."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends.

    The fields whose default is None take the value of the model's generation_config.json where it has one, else
    the neutral value named beside them. (vLLM does so in its server; here it holds everywhere.)

    Raises InvalidParameterError for a value outside its limits.
    """

    n: int = 1
    """Completions of each prompt."""
    temperature: float | None = None
    """Divides the logits; 0 always takes the likeliest token. Else 1."""
    top_p: float | None = None
    """Keeps the likeliest tokens that together reach this probability. Else 1."""
    top_k: int | None = None
    """Keeps this many of the likeliest tokens; 0 or -1 keeps all. Else 0."""
    min_p: float | None = None
    """Drops tokens less likely than this fraction of the likeliest. Else 0."""
    repetition_penalty: float | None = None
    """Divides (or multiplies, if negative) the logits of tokens of the prompt and the output. Else 1."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that the output has it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the logits of these tokens."""
    seed: int | None = None
    """Of the random numbers; None draws one. The output reports it."""
    stop: str | Sequence[str] = ()
    """Strings that end the output when they appear in it."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, beside the model's own."""
    ignore_eos: bool = False
    """Whether to go on after the model's own end-of-sequence tokens."""
    max_tokens: int | None = None
    """Most tokens to generate; None means the rest of the context."""
    min_tokens: int = 0
    """Tokens before which nothing but `max_tokens` ends the output."""
    logprobs: int | None = None
    """Likeliest alternatives to report for each token, 0 for the chosen one alone; None for no report."""
    prompt_logprobs: int | None = None
    """Likewise for each token of the prompt but the first."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string, or the text of the stop token, that ended it."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must be. It ends where that is complete; `finish_reason` is then `stop`."""
    prediction: str | Sequence[int] | Mapping[str, Any] | None = None
    """What is expected to come, as text, as token ids, or as OpenAI's API has it: the file that is to be edited, say.
    Where it comes true the output is there sooner; it never changes a token."""

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "n": check_whole("n", self.n, 1, MAX_N),
            "presence_penalty": check_number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": check_number("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": _checked_bias(self.logit_bias),
            "stop": _checked_stop(self.stop),
            "stop_token_ids": _checked_stop_token_ids(self.stop_token_ids),
            "min_tokens": check_whole("min_tokens", self.min_tokens, 0, MAX_COUNT),
            "prediction": check_prediction(self.prediction),
        }
        if self.temperature is not None:
            checked["temperature"] = check_number("temperature", self.temperature, 0, 100)
        if self.top_p is not None:
            checked["top_p"] = check_number("top_p", self.top_p, 0, 1, above_low=True)
        if self.top_k is not None:
            checked["top_k"] = max(check_whole("top_k", self.top_k, -1, MAX_COUNT), 0)
        if self.min_p is not None:
            checked["min_p"] = check_number("min_p", self.min_p, 0, 1)
        if self.repetition_penalty is not None:
            penalty = check_number("repetition_penalty", self.repetition_penalty, 0, 100, above_low=True)
            checked["repetition_penalty"] = penalty
        for name, limit in (("seed", 2**64 - 1), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                checked[name] = check_whole(name, getattr(self, name), 0, limit)
        if self.max_tokens is not None:
            checked["max_tokens"] = check_whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise InvalidParameterError(
                    f"min_tokens is {self.min_tokens}; the limit is max_tokens, {self.max_tokens}"
                )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(f"{name} is {shown(getattr(self, name))}; it must be True or False")
        _check_structure(self.structured_outputs)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def completed(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with fields that are None taken from `defaults`, else from the neutral values."""
        missing = {name: getattr(defaults, name) for name in STANDARD if getattr(self, name) is None}
        return replace(self, **{name: STANDARD[name] if value is None else value for name, value in missing.items()})

    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        plain = SamplingParams()
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)}


def _check_structure(structure: object) -> None:
    if structure is not None and not isinstance(structure, StructuredOutputsParams):
        raise InvalidParameterError(f"structured_outputs is {shown(structure)}; it must be a StructuredOutputsParams")


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidParameterError(f"logit_bias is {shown(bias)}; it must map token ids to numbers")
    checked: dict[int, float] = {}
    for token, value in cast("Mapping[object, object]", bias).items():
        whole = check_whole("logit_bias token id", token, 0, MAX_TOKEN_ID)
        checked[whole] = check_number(f"logit_bias[{whole}]", value, -100, 100)
    return checked


def _checked_stop(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence):
        raise InvalidParameterError(f"stop is {shown(stop)}; it must be a string or a list of strings")
    strings = cast("Sequence[object]", stop)
    if len(strings) > MAX_STOP:
        raise InvalidParameterError(f"stop has {len(strings)} strings; the limit is {MAX_STOP}")
    checked: list[str] = []
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise InvalidParameterError(f"stop[{index}] is {shown(string)}; it must be a string that is not empty")
        if len(string) > MAX_STOP_LENGTH:
            raise InvalidParameterError(f"stop[{index}] has {len(string)} characters; the limit is {MAX_STOP_LENGTH}")
        checked.append(string)
    return tuple(checked)


def _checked_stop_token_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidParameterError(f"stop_token_ids is {shown(ids)}; it must be a list of token ids")
    tokens = cast("Sequence[object]", ids)
    if len(tokens) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameterError(f"stop_token_ids has {len(tokens)} ids; the limit is {MAX_STOP_TOKEN_IDS}")
    return tuple(check_whole(f"stop_token_ids[{i}]", token, 0, MAX_TOKEN_ID) for i, token in enumerate(tokens))
