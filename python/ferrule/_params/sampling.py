"""What a request may ask of the sampler: vLLM's names, checked when the object is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from ferrule._params.logits_processors import LogitsProcessor
from ferrule._params.speculative import check_prediction
from ferrule._params.structured import StructuredOutputsParams
from ferrule._validation import check_number, check_whole, shown
from ferrule.errors import InvalidParameterError

MAX_COUNT = 2**31 - 1
"""Limit of counts of tokens: no context is longer."""
MAX_N = 128
"""Completions of one prompt."""
MAX_LOGPROBS = 20
"""Alternatives reported for a token, as in OpenAI's API."""
MAX_STOP = 256
"""Stop strings of a request."""
MAX_STOP_LENGTH = 4096
"""Characters of a stop string, and of other strings."""
MAX_STOP_TOKEN_IDS = 1024
"""Stop tokens of a request."""
MAX_TOKEN_ID = 2**32 - 1
MAX_BAD_WORDS = 512
"""Forbidden words of a request, and forbidden sequences; a word is one or two of the engine's 1,536 sequences."""
MAX_BAD_WORD_TOKENS = 256
"""Tokens of a forbidden sequence."""
MAX_ALLOWED_TOKEN_IDS = 1 << 20
"""Tokens that a request may be limited to."""
MAX_NGRAM = 1024
"""Tokens of an n-gram that must not come twice."""
MAX_BREAKERS = 64
"""Strings across which DRY finds no repeats."""
MAX_PROCESSORS = 32
"""Logits processors of a request."""

NUMBERS_OF_MODELS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (0, 100, True),
}
"""As `NUMBERS`, of fields that may be left to the model."""
NUMBERS: dict[str, tuple[float, float, bool]] = {
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "dynatemp_range": (0, 100, False),
    "dynatemp_exponent": (0, 100, False),
    "top_n_sigma": (-1, 100, False),
    "typical_p": (0, 1, True),
    "epsilon_cutoff": (0, 1, False),
    "eta_cutoff": (0, 1, False),
    "top_h": (0, 1, False),
    "xtc_probability": (0, 1, False),
    "xtc_threshold": (0, 1, False),
    "dry_multiplier": (0, 100, False),
    "dry_base": (1, 100, False),
    "mirostat_tau": (0, 100, True),
    "mirostat_eta": (0, 1, True),
}
"""Fields that are real numbers: the smallest value, the largest, and whether the smallest itself is outside."""
WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "dry_allowed_length": (1, MAX_COUNT),
    "dry_penalty_last_n": (-1, MAX_COUNT),
    "mirostat": (0, 2),
    "no_repeat_ngram_size": (0, MAX_NGRAM),
}
"""Fields that are whole numbers: the smallest value and the largest."""

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
    best_of: int | None = None
    """Completions that are computed of each prompt. The `n` whose tokens have the highest mean log-probability are
    returned, the best first (OpenAI's meaning). None for `n`; a stream takes no more than that."""
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
    dynatemp_range: float = 0.0
    """Lets the temperature follow the entropy, from so much below `temperature` to so much above it; 0 does not."""
    dynatemp_exponent: float = 1.0
    """The power of the entropy, as a share of its most, by which it does."""
    top_n_sigma: float = 0.0
    """Keeps logits within this many standard deviations of the highest; 0 or -1 keeps all."""
    typical_p: float = 1.0
    """Keeps the tokens of this probability together whose surprise is nearest to the entropy; 1 keeps all."""
    epsilon_cutoff: float = 0.0
    """Drops tokens less likely than this; 0 keeps all."""
    eta_cutoff: float = 0.0
    """Drops tokens less likely than this, or than a bound that falls with the entropy; 0 keeps all."""
    top_h: float = 0.0
    """Keeps the likeliest tokens up to this share of the entropy; 0 keeps all."""
    xtc_probability: float = 0.0
    """How often the likeliest tokens are dropped, but for the least likely of them."""
    xtc_threshold: float = 0.1
    """The probability that makes a token one of them."""
    dry_multiplier: float = 0.0
    """Subtracted from the logit of a token that goes on with a repeat of `dry_allowed_length` tokens; 0 is off."""
    dry_base: float = 1.75
    """Multiplies that for each token that the repeat is longer."""
    dry_allowed_length: int = 2
    """Tokens of a repeat from which on it costs something."""
    dry_penalty_last_n: int = -1
    """Tokens at the end of the text in which repeats are looked for; -1 means all, 0 none."""
    dry_sequence_breakers: str | Sequence[str] = ("\n", ":", '"', "*")
    """Strings across which repeats do not reach: tokens that contain one of them."""
    mirostat: int = 0
    """Version 1 or 2 of mirostat; 0 is off."""
    mirostat_tau: float = 5.0
    """The surprise that mirostat holds, in bits."""
    mirostat_eta: float = 0.1
    """How fast it does."""
    no_repeat_ngram_size: int = 0
    """No sequence of so many tokens comes twice in prompt and output; 0 allows all."""
    bad_words: str | Sequence[str] = ()
    """Words that must not come, at the beginning of a text or after a space (vLLM's reading)."""
    bad_words_ids: Sequence[Sequence[int]] = ()
    """Sequences of tokens that must not come (Hugging Face's)."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may come."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Functions that change logits: see ferrule._params.logits_processors."""
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
    entropy: bool = False
    """Whether to report the entropy of the model's probabilities before each token."""
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
            "best_of": _checked_best_of(self.best_of, self.n),
            "dry_sequence_breakers": _checked_strings(
                "dry_sequence_breakers", self.dry_sequence_breakers, MAX_BREAKERS
            ),
            "bad_words": _checked_strings("bad_words", self.bad_words, MAX_BAD_WORDS),
            "bad_words_ids": _checked_bad_words_ids(self.bad_words_ids),
            "allowed_token_ids": _checked_allowed(self.allowed_token_ids),
            "logits_processors": _checked_processors(self.logits_processors),
            "logit_bias": _checked_bias(self.logit_bias),
            "stop": _checked_strings("stop", self.stop, MAX_STOP),
            "stop_token_ids": _checked_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            "min_tokens": check_whole("min_tokens", self.min_tokens, 0, MAX_COUNT),
            "prediction": check_prediction(self.prediction),
        }
        for name, (low, high, above_low) in NUMBERS.items():
            checked[name] = check_number(name, getattr(self, name), low, high, above_low=above_low)
        checked["top_n_sigma"] = max(check_number("top_n_sigma", self.top_n_sigma, -1, 100), 0.0)
        for name, (least, most) in WHOLE_NUMBERS.items():
            checked[name] = check_whole(name, getattr(self, name), least, most)
        for name, (low, high, above_low) in NUMBERS_OF_MODELS.items():
            if getattr(self, name) is not None:
                checked[name] = check_number(name, getattr(self, name), low, high, above_low=above_low)
        if self.top_k is not None:
            checked["top_k"] = max(check_whole("top_k", self.top_k, -1, MAX_COUNT), 0)
        for name, limit in (("seed", 2**64 - 1), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                checked[name] = check_whole(name, getattr(self, name), 0, limit)
        if self.max_tokens is not None:
            checked["max_tokens"] = check_whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise InvalidParameterError(
                    f"min_tokens is {self.min_tokens}; the limit is max_tokens, {self.max_tokens}"
                )
        for name in ("ignore_eos", "entropy", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(f"{name} is {shown(getattr(self, name))}; it must be True or False")
        _check_structure(self.structured_outputs)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def ranks(self) -> bool:
        """Whether more completions are computed than are returned."""
        return self.best_of is not None and self.best_of > self.n

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


def _checked_best_of(best_of: object, n: int) -> int | None:
    if best_of is None:
        return None
    checked = check_whole("best_of", best_of, 1, MAX_N)
    if checked < n:
        raise InvalidParameterError(f"best_of is {checked}; it must be at least n, {n}")
    return checked


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidParameterError(f"logit_bias is {shown(bias)}; it must map token ids to numbers")
    checked: dict[int, float] = {}
    for token, value in cast("Mapping[object, object]", bias).items():
        whole = check_whole("logit_bias token id", token, 0, MAX_TOKEN_ID)
        checked[whole] = check_number(f"logit_bias[{whole}]", value, -100, 100)
    return checked


def _checked_strings(name: str, given: object, limit: int) -> tuple[str, ...]:
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Sequence):
        raise InvalidParameterError(f"{name} is {shown(given)}; it must be a string or a list of strings")
    strings = cast("Sequence[object]", given)
    if len(strings) > limit:
        raise InvalidParameterError(f"{name} has {len(strings)} strings; the limit is {limit}")
    checked: list[str] = []
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise InvalidParameterError(f"{name}[{index}] is {shown(string)}; it must be a string that is not empty")
        if len(string) > MAX_STOP_LENGTH:
            raise InvalidParameterError(f"{name}[{index}] has {len(string)} characters; the limit is {MAX_STOP_LENGTH}")
        checked.append(string)
    return tuple(checked)


def _checked_token_ids(name: str, ids: object, limit: int) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidParameterError(f"{name} is {shown(ids)}; it must be a list of token ids")
    tokens = cast("Sequence[object]", ids)
    if len(tokens) > limit:
        raise InvalidParameterError(f"{name} has {len(tokens)} ids; the limit is {limit}")
    return tuple(check_whole(f"{name}[{i}]", token, 0, MAX_TOKEN_ID) for i, token in enumerate(tokens))


def _checked_allowed(ids: object) -> tuple[int, ...] | None:
    if ids is None:
        return None
    allowed = _checked_token_ids("allowed_token_ids", ids, MAX_ALLOWED_TOKEN_IDS)
    if not allowed:
        raise InvalidParameterError("allowed_token_ids is empty; it must have at least one token id")
    return tuple(sorted(set(allowed)))


def _checked_bad_words_ids(given: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise InvalidParameterError(f"bad_words_ids is {shown(given)}; it must be a list of lists of token ids")
    words = cast("Sequence[object]", given)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameterError(f"bad_words_ids has {len(words)} lists; the limit is {MAX_BAD_WORDS}")
    checked = tuple(
        _checked_token_ids(f"bad_words_ids[{index}]", word, MAX_BAD_WORD_TOKENS) for index, word in enumerate(words)
    )
    if () in checked:
        where = f"bad_words_ids[{checked.index(())}]"
        raise InvalidParameterError(f"{where} is empty; it must have at least one token id")
    return checked


def _checked_processors(given: object) -> tuple[LogitsProcessor, ...]:
    if not isinstance(given, Sequence):
        raise InvalidParameterError(f"logits_processors is {shown(given)}; it must be a list of functions")
    processors = cast("Sequence[object]", given)
    if len(processors) > MAX_PROCESSORS:
        raise InvalidParameterError(f"logits_processors has {len(processors)} functions; the limit is {MAX_PROCESSORS}")
    for index, processor in enumerate(processors):
        if not callable(processor):
            raise InvalidParameterError(f"logits_processors[{index}] is {shown(processor)}; it must be a function")
    return tuple(cast("Sequence[LogitsProcessor]", processors))
