"""`SamplingParams`: parameters that select tokens and end a request, under vLLM's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Self, cast

from ferrule._params.compatibility import Ignored, Refused, Renamed, Rules, compatible
from ferrule._params.declaration import Doc, Flag, Integer, Number, check_bounds
from ferrule._params.logits_processors import LogitsProcessor
from ferrule._params.speculative import check_prediction
from ferrule._params.structured import StructuredOutputsParams
from ferrule._validation import check_integer, check_number
from ferrule.errors import InvalidParameterError

MAX_COUNT = 2**31 - 1
"""Maximum of parameters that count tokens; no context is longer."""
MAX_N = 128
"""Maximum number of completions of one prompt."""
MAX_LOGPROBS = 20
"""Maximum number of alternatives to report for a token, as in OpenAI's API."""
MAX_STOP = 256
"""Maximum number of stop strings of a request."""
MAX_STOP_LENGTH = 4096
"""Maximum number of characters of a stop string, a bad word or a sequence breaker."""
MAX_STOP_TOKEN_IDS = 1024
"""Maximum number of stop tokens of a request."""
MAX_TOKEN_ID = 2**32 - 1
MAX_BAD_WORDS = 512
"""Maximum number of bad words of a request. A word becomes one or two token sequences, of which the engine allows
1,536."""
MAX_BAD_WORD_TOKENS = 256
"""Maximum number of tokens of a forbidden sequence."""
MAX_ALLOWED_TOKEN_IDS = 1 << 20
"""Maximum number of entries of `allowed_token_ids`."""
MAX_NGRAM = 1024
"""Maximum number of tokens of an n-gram that must not repeat."""
MAX_BREAKERS = 64
"""Maximum number of DRY sequence breakers."""
MAX_PROCESSORS = 32
"""Maximum number of logits processors of a request."""
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1

STANDARD = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": None,
}
"""Fields that a model's generation_config.json may set, with the values that disable them."""


class RequestOutputKind(enum.Enum):
    """Kind of the outputs that `AsyncLLM.generate` yields, under vLLM's names."""

    CUMULATIVE = 0
    """Each output has everything generated so far."""
    DELTA = 1
    """Each output has the changes since the previous output."""
    FINAL_ONLY = 2
    """Only the finished output is yielded."""


FOREIGN: Rules = {
    "stream_interval": Ignored(None, "every engine step is reported; a slow reader gets the newest state"),
    "skip_clone": Ignored(False, "SamplingParams never change"),
    "spaces_between_special_tokens": Ignored(True, "special tokens are decoded as the tokenizer's files say"),
    "flat_logprobs": Ignored(False, "logprobs are lists of dictionaries"),
    "extra_args": Refused(None, "use logits_processors for custom sampling"),
    "truncate_prompt_tokens": Refused(None, 'tokenize, cut, and pass {"prompt_token_ids": ids[-n:]}'),
    "prompt_logprob_token_ids": Refused(None, "use LLM.logits(token_ids)"),
    "prompt_logprob_start": Refused(None, "use LLM.logits(token_ids, first=n)"),
    "logprob_token_ids": Refused(None, "use LLM.loglikelihood, or LLM.logits(token_ids)"),
    "skip_reading_prefix_cache": Refused(False, "give the prompt its own cache_salt"),
    "thinking_token_budget": Refused(None, "limit the whole output with max_tokens"),
    "repetition_detection": Refused(None, "use no_repeat_ngram_size or dry_multiplier"),
    "routed_experts_prompt_start": Refused(0, "routed experts are not reported"),
    "trace_decode_token_ids": Refused(None, "use LLM.loglikelihood(prompt, token_ids)"),
    "guided_decoding": Refused(None, "use structured_outputs=StructuredOutputsParams(...)"),
    # transformers
    "max_new_tokens": Renamed("max_tokens"),
    "min_new_tokens": Renamed("min_tokens"),
    "num_return_sequences": Renamed("n"),
    "stop_strings": Renamed("stop"),
    "do_sample": Refused(None, "use temperature=0 for greedy decoding, temperature=1 for sampling"),
    "num_beams": Refused(1, "use LLM.beam_search with BeamSearchParams(beam_width=...)"),
    "max_length": Refused(None, "use max_tokens, which counts only generated tokens"),
    "streamer": Refused(None, "iterate over LLM.stream(prompt, params)"),
    # llama-cpp-python
    "repeat_penalty": Renamed("repetition_penalty"),
    "mirostat_mode": Renamed("mirostat"),
    "response_format": Refused(None, "use structured_outputs=StructuredOutputsParams.from_response_format(...)"),
    "grammar": Refused(None, "use structured_outputs=StructuredOutputsParams(grammar=...)"),
    "stream": Refused(False, "iterate over LLM.stream(prompt, params)"),
}
"""Fields of other libraries' sampling parameters."""


@compatible(FOREIGN)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Names, meanings and defaults are vLLM's; some parameters are ferrule's own.

    If a field whose default is None is not set, the value of the model's generation_config.json applies. The object is
    immutable; `clone` makes a changed copy.

        >>> from ferrule import SamplingParams
        >>> params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["END"])
        >>> params.clone(temperature=0).temperature
        0.0
        >>> SamplingParams(temperature=-1)
        Traceback (most recent call last):
        ...
        ferrule.errors.InvalidParameterError: temperature must be a number from 0 to 100, got -1

    Raises InvalidParameterError for an invalid value.
    """

    n: Annotated[int, Integer(1, MAX_N), Doc("Number of completions of each prompt.")] = 1
    best_of: Annotated[
        int | None,
        Integer(1, MAX_N),
        Doc(
            "Number of completions to compute for each prompt. The `n` with the highest mean log-probability are "
            "returned, the best first. None means `n`; a stream has one completion."
        ),
    ] = None
    temperature: Annotated[
        float | None, Number(0, 100), Doc("Divisor of the logits; 0 means greedy decoding. None: the model's, else 1.")
    ] = 1.0
    top_p: Annotated[
        float | None,
        Number(0, 1, above_low=True),
        Doc("Keeps the most likely tokens whose total probability reaches this value. None: the model's, else 1."),
    ] = 1.0
    top_k: Annotated[
        int | None,
        Integer(-1, MAX_COUNT),
        Doc("Keeps this many of the most likely tokens; 0 or -1 keeps all. None: the model's, else 0."),
    ] = 0
    min_p: Annotated[
        float | None,
        Number(0, 1),
        Doc("Drops tokens less likely than this fraction of the most likely token. None: the model's, else 0."),
    ] = 0.0
    repetition_penalty: Annotated[
        float | None,
        Number(0, 100, above_low=True),
        Doc(
            "Divides positive and multiplies negative logits of tokens in the prompt or the output. None: the model's, "
            "else 1."
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Number(-2, 2), Doc("Penalty subtracted from the logits of tokens that the output contains.")
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Number(-2, 2),
        Doc("Penalty subtracted from the logit of a token once for each occurrence in the output."),
    ] = 0.0
    dynatemp_range: Annotated[
        float,
        Number(0, 100),
        Doc("Range of the dynamic temperature around `temperature`, which follows the entropy; 0 disables it."),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, Number(0, 100), Doc("Exponent of the normalized entropy in the dynamic temperature.")
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Number(-1, 100),
        Doc("Keeps logits within this many standard deviations of the highest; 0 or -1 keeps all."),
    ] = 0.0
    typical_p: Annotated[
        float,
        Number(0, 1, above_low=True),
        Doc("Keeps tokens of this total probability, those with surprise nearest to the entropy first; 1 keeps all."),
    ] = 1.0
    epsilon_cutoff: Annotated[float, Number(0, 1), Doc("Drops tokens less likely than this value; 0 keeps all.")] = 0.0
    eta_cutoff: Annotated[
        float,
        Number(0, 1),
        Doc("Drops tokens less likely than this value or a bound that decreases with the entropy; 0 keeps all."),
    ] = 0.0
    top_h: Annotated[
        float,
        Number(0, 1),
        Doc("Keeps the most likely tokens whose entropy stays within this share of the total; 0 keeps all."),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Number(0, 1),
        Doc("Probability of dropping all but the least likely of the tokens above `xtc_threshold` (XTC)."),
    ] = 0.0
    xtc_threshold: Annotated[float, Number(0, 1), Doc("Minimum probability of tokens that XTC may drop.")] = 0.1
    dry_multiplier: Annotated[
        float,
        Number(0, 100),
        Doc("Penalty of a token that extends a repeat of `dry_allowed_length` tokens (DRY); 0 disables DRY."),
    ] = 0.0
    dry_base: Annotated[
        float, Number(1, 100), Doc("Base of the exponential penalty per extra repeated token (DRY).")
    ] = 1.75
    dry_allowed_length: Annotated[
        int, Integer(1, MAX_COUNT), Doc("Minimum length in tokens of a repeat that is penalized (DRY).")
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        Integer(-1, MAX_COUNT),
        Doc("Number of last tokens to search for repeats (DRY); -1 searches all tokens, 0 none."),
    ] = -1
    dry_sequence_breakers: Annotated[
        str | Sequence[str],
        Doc("Strings that end a repeat; no repeat extends across a token that contains one of them (DRY)."),
    ] = ("\n", ":", '"', "*")
    mirostat: Annotated[int, Integer(0, 2), Doc("Version of Mirostat sampling, 1 or 2; 0 disables it.")] = 0
    mirostat_tau: Annotated[float, Number(0, 100, above_low=True), Doc("Target surprise of Mirostat, in bits.")] = 5.0
    mirostat_eta: Annotated[float, Number(0, 1, above_low=True), Doc("Learning rate of Mirostat.")] = 0.1
    no_repeat_ngram_size: Annotated[
        int,
        Integer(0, MAX_NGRAM),
        Doc("Length of token sequences that must not occur twice in prompt and output; 0 allows all."),
    ] = 0
    bad_words: Annotated[
        str | Sequence[str] | None,
        Doc("Words that must not be generated at the beginning of the text or after a space."),
    ] = ()
    bad_words_ids: Annotated[
        Sequence[Sequence[int]] | None, Doc("Token sequences that must not be generated (Hugging Face's name).")
    ] = ()
    allowed_token_ids: Annotated[
        Sequence[int] | None, Doc("Token ids that may be generated. None: the whole vocabulary.")
    ] = None
    logits_processors: Annotated[
        Sequence[LogitsProcessor] | None, Doc("Functions that change the logits before each token.")
    ] = ()
    logit_bias: Annotated[
        Mapping[int, float] | None, Doc("Numbers from -100 to 100 that are added to the logits of token ids.")
    ] = None
    seed: Annotated[
        int | None,
        Integer(0, 2**64 - 1),
        Doc("Seed of the random numbers. -1 and None: a random seed, which the output reports."),
    ] = None
    stop: Annotated[str | Sequence[str] | None, Doc("Strings that end the output when they are generated.")] = ()
    stop_token_ids: Annotated[
        Sequence[int] | None, Doc("Token ids that end the output, besides the model's end-of-sequence tokens.")
    ] = ()
    ignore_eos: Annotated[bool, Flag(), Doc("Whether to continue after the model's end-of-sequence tokens.")] = False
    max_tokens: Annotated[
        int | None,
        Integer(1, MAX_COUNT),
        Doc("Maximum number of tokens to generate. None: the model's max_new_tokens, else the rest of the context."),
    ] = 16
    min_tokens: Annotated[
        int, Integer(0, MAX_COUNT), Doc("Minimum number of tokens to generate, unless `max_tokens` is reached.")
    ] = 0
    logprobs: Annotated[
        int | None,
        Integer(0, MAX_LOGPROBS),
        Doc(
            "Number of most likely alternatives to report for each token, with the log-probability of the chosen one. "
            "None: no report."
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Integer(0, MAX_LOGPROBS),
        Doc("Number of most likely alternatives to report for each prompt token after the first. None: no report."),
    ] = None
    entropy: Annotated[
        bool, Flag(), Doc("Whether to report the entropy of the model's probabilities before each token.")
    ] = False
    detokenize: Annotated[
        bool, Flag(), Doc("Whether to convert tokens to text; otherwise the text of the output is empty.")
    ] = True
    skip_special_tokens: Annotated[bool, Flag(), Doc("Whether to omit special tokens from the text.")] = True
    include_stop_str_in_output: Annotated[
        bool, Flag(), Doc("Whether to keep the stop string, or the text of the stop token, in the text.")
    ] = False
    output_kind: Annotated[
        RequestOutputKind,
        Doc("Kind of outputs of `AsyncLLM.generate`: everything so far, changes, or only the finished output."),
    ] = RequestOutputKind.CUMULATIVE
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        Doc("Structure that the output must match; a complete structure ends the output with reason `stop`."),
    ] = None
    prediction: Annotated[
        str | Sequence[int] | Mapping[str, Any] | None,
        Doc(
            "Predicted output, as text, token ids or OpenAI's object; speeds up generation where it matches and never "
            "changes a token."
        ),
    ] = None

    def __post_init__(self) -> None:
        changed: dict[str, object] = {
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
            "prediction": check_prediction(self.prediction),
            "seed": None if self.seed == -1 else self.seed,
            "logprobs": _checked_logprobs("logprobs", self.logprobs),
            "prompt_logprobs": _checked_logprobs("prompt_logprobs", self.prompt_logprobs),
        }
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        check_bounds(self)
        for name in ("top_n_sigma", "top_k"):  # -1 means 0
            number: float | None = getattr(self, name)
            object.__setattr__(self, name, number if number is None else max(number, type(number)(0)))
        self._check_together()

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameterError("best_of", self.best_of, f"at least n ({self.n})")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise InvalidParameterError("stop", self.stop, "left out with detokenize=False; use stop_token_ids")
        if not isinstance(cast("object", self.output_kind), RequestOutputKind):
            raise InvalidParameterError("output_kind", self.output_kind, "a RequestOutputKind")
        structure = cast("object", self.structured_outputs)
        if structure is not None and not isinstance(structure, StructuredOutputsParams):
            raise InvalidParameterError("structured_outputs", structure, "a StructuredOutputsParams")

    @classmethod
    def with_model_defaults(cls, **given: Any) -> Self:
        """Creates parameters with the given fields; the others take the model's generation_config.json if it sets them.

        Raises InvalidParameterError.
        """
        left_open: dict[str, Any] = dict.fromkeys(STANDARD)
        return cls(**{**left_open, **given})

    def clone(self, **changes: Any) -> Self:
        """Returns a copy, with some fields changed.

        Raises InvalidParameterError.
        """
        return replace(self, **changes)

    @property
    def ranks(self) -> bool:
        """Whether more completions are computed than are returned."""
        return self.best_of is not None and self.best_of > self.n

    def completed(self, defaults: SamplingParams) -> SamplingParams:
        """Returns parameters in which None is replaced by the value of `defaults`, or else by the neutral value."""
        missing = {name: getattr(defaults, name) for name in STANDARD if getattr(self, name) is None}
        filled = {name: STANDARD[name] if value is None else value for name, value in missing.items()}
        return replace(self, **filled) if filled else self

    def given(self) -> dict[str, Any]:
        """Returns the fields that differ from `with_model_defaults()`."""
        plain = SamplingParams.with_model_defaults()
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)}


def _checked_logprobs(name: str, given: object) -> object:
    if given is True:
        return 1
    if given == -1 and not isinstance(given, bool):
        requirement = f"an integer from 0 to {MAX_LOGPROBS} (use LLM.logits(token_ids) for the whole vocabulary)"
        raise InvalidParameterError(name, given, requirement)
    return given


def _checked_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise InvalidParameterError("logit_bias", bias, "a mapping from token ids to numbers")
    checked: dict[int, float] = {}
    for token, value in cast("Mapping[object, object]", bias).items():
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10:
            token = int(token)  # noqa: PLW2901  # keys are text in JSON
        token_id = check_integer("logit_bias token id", token, 0, MAX_TOKEN_ID)
        checked[token_id] = check_number(f"logit_bias[{token_id}]", value, -100, 100)
    return checked


def _checked_strings(name: str, given: object, limit: int) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Sequence):
        raise InvalidParameterError(name, given, "a string or a list of strings")
    strings = cast("Sequence[object]", given)
    if len(strings) > limit:
        raise InvalidParameterError(name, strings, f"a list of at most {limit} strings")
    checked: list[str] = []
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_LENGTH:
            requirement = f"a non-empty string of at most {MAX_STOP_LENGTH} characters"
            raise InvalidParameterError(f"{name}[{index}]", string, requirement)
        checked.append(string)
    return tuple(checked)


def _checked_token_ids(name: str, ids: object, limit: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidParameterError(name, ids, "a list of token ids")
    tokens = cast("Sequence[object]", ids)
    if len(tokens) > limit:
        raise InvalidParameterError(name, tokens, f"a list of at most {limit} token ids")
    return tuple(check_integer(f"{name}[{i}]", token, 0, MAX_TOKEN_ID) for i, token in enumerate(tokens))


def _checked_allowed(ids: object) -> tuple[int, ...] | None:
    if ids is None:
        return None
    allowed = _checked_token_ids("allowed_token_ids", ids, MAX_ALLOWED_TOKEN_IDS)
    if not allowed:
        raise InvalidParameterError("allowed_token_ids", ids, "a list of at least one token id")
    return tuple(sorted(set(allowed)))


def _checked_bad_words_ids(given: object) -> tuple[tuple[int, ...], ...]:
    if given is None:
        return ()
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise InvalidParameterError("bad_words_ids", given, "a list of lists of token ids")
    words = cast("Sequence[object]", given)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameterError("bad_words_ids", words, f"a list of at most {MAX_BAD_WORDS} lists of token ids")
    checked: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        name = f"bad_words_ids[{index}]"
        checked.append(() if word is None else _checked_token_ids(name, word, MAX_BAD_WORD_TOKENS))
        if not checked[-1]:
            raise InvalidParameterError(name, word, "a list of at least one token id")
    return tuple(checked)


def _checked_processors(given: object) -> tuple[LogitsProcessor, ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence):
        raise InvalidParameterError("logits_processors", given, "a list of functions")
    processors = cast("Sequence[object]", given)
    if len(processors) > MAX_PROCESSORS:
        raise InvalidParameterError("logits_processors", processors, f"a list of at most {MAX_PROCESSORS} functions")
    for index, processor in enumerate(processors):
        if not callable(processor):
            raise InvalidParameterError(f"logits_processors[{index}]", processor, "a function")
    return tuple(cast("Sequence[LogitsProcessor]", processors))
