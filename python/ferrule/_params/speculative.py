"""Speculative decoding: vLLM's `speculative_config`, and the prediction of a request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ferrule._validation import check_choice, check_flag, check_integer
from ferrule.errors import InvalidParameterError

METHODS = ("ngram", "draft_model")
"""Sources of speculative tokens: earlier occurrences of the same tokens (prompt lookup), or a smaller model."""
MAX_SPECULATIVE_TOKENS = 64
"""Maximum number of speculative tokens of a sequence in a step."""
MAX_PROMPT_LOOKUP = 64
"""Maximum number of tokens that a prompt lookup compares."""
NUM_SPECULATIVE_TOKENS = {"ngram": 15, "draft_model": 7}
"""Default number of speculative tokens by method. A step computes one row for each of them and one for the token before
them; matmuls with up to 16 rows are fast. A draft model takes time for each token, so it proposes half as many."""
PROMPT_LOOKUP_MIN, PROMPT_LOOKUP_MAX = 2, 8
MAX_PREDICTION_LENGTH = 1 << 22
"""Maximum number of characters of a prediction that is given as text."""
MAX_PREDICTION_TOKENS = 1 << 20
"""Maximum number of tokens of a prediction."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Configuration of speculative decoding for all requests of an engine. The output does not depend on it.

    Raises InvalidParameterError for an invalid value.
    """

    method: str
    """Source of speculative tokens: `ngram` or `draft_model`."""
    num_speculative_tokens: int
    """Maximum number of speculative tokens of a sequence in a step."""
    adaptive: bool = True
    """Whether the engine proposes fewer tokens while the acceptance rate is low."""
    prompt_lookup_min: int = PROMPT_LOOKUP_MIN
    """Minimum number of tokens that must match an earlier occurrence (`ngram`)."""
    prompt_lookup_max: int = PROMPT_LOOKUP_MAX
    """Maximum number of tokens to compare; the longest match is used (`ngram`)."""
    model: str | None = None
    """Draft model, a directory or `org/repo`, with the same vocabulary as the model (`draft_model`)."""
    quantization: str = "auto"
    """Weight format of the draft model."""
    revision: str | None = None
    """Branch, tag or commit of the draft model on the Hugging Face hub."""

    @classmethod
    def read(cls, given: object) -> SpeculativeConfig | None:
        """Reads a mapping of these fields; None disables speculative decoding.

        Fields with a default may be left out, and so may `num_speculative_tokens`. With a `model`, the method may be
        left out too.

        Raises InvalidParameterError.
        """
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise InvalidParameterError("speculative_config", given, "a mapping")
        fields = {str(name): value for name, value in cast("Mapping[object, object]", given).items()}
        for name in fields:
            if name not in cls.__dataclass_fields__:
                names = ", ".join(cls.__dataclass_fields__)
                raise InvalidParameterError("speculative_config", fields, f"a mapping of {names} (no {name:.50})")
        method = fields.get("method") or ("draft_model" if fields.get("model") else None)
        fields["method"] = method = check_choice("speculative_config.method", method, METHODS)
        if fields.get("num_speculative_tokens") is None:
            fields["num_speculative_tokens"] = NUM_SPECULATIVE_TOKENS[method]
        # If one bound is given alone, the default of the other one is adapted to it.
        if fields.get("prompt_lookup_max") is not None and fields.get("prompt_lookup_min") is None:
            longest = _checked("prompt_lookup_max", fields["prompt_lookup_max"], MAX_PROMPT_LOOKUP)
            fields["prompt_lookup_min"] = min(PROMPT_LOOKUP_MIN, longest)
        elif fields.get("prompt_lookup_min") is not None and fields.get("prompt_lookup_max") is None:
            shortest = _checked("prompt_lookup_min", fields["prompt_lookup_min"], MAX_PROMPT_LOOKUP)
            fields["prompt_lookup_max"] = max(PROMPT_LOOKUP_MAX, shortest)
        return cls(**cast("Any", {name: value for name, value in fields.items() if value is not None}))

    def __post_init__(self) -> None:
        _checked("num_speculative_tokens", self.num_speculative_tokens, MAX_SPECULATIVE_TOKENS)
        longest = _checked("prompt_lookup_max", self.prompt_lookup_max, MAX_PROMPT_LOOKUP)
        _checked("prompt_lookup_min", self.prompt_lookup_min, longest)
        check_flag("speculative_config.adaptive", self.adaptive)
        if self.method == "draft_model":
            model = cast("object", self.model)
            if not isinstance(model, (str, os.PathLike)):
                raise InvalidParameterError("speculative_config.model", model, "the path or name of the draft model")
            object.__setattr__(self, "model", os.fspath(cast("os.PathLike[str]", model)))
        elif self.model is not None:
            raise InvalidParameterError("speculative_config.model", self.model, f"left out with method {self.method}")

    def engine_options(self) -> dict[str, Any]:
        """Returns the fields that the native module reads. The draft model is passed separately."""
        lookup = [self.prompt_lookup_min, self.prompt_lookup_max] if self.method == "ngram" else None
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompt_lookup": lookup,
            "adaptive": self.adaptive,
        }


def check_prediction(given: object) -> str | tuple[int, ...] | None:
    """Returns a prediction, given as text, token ids, or OpenAI's `{"type": "content", "content": ...}`.

    Raises InvalidParameterError.
    """
    if isinstance(given, Mapping):
        given = _content(cast("Mapping[object, object]", given))
    if given is None:
        return None
    if isinstance(given, str):
        if len(given) > MAX_PREDICTION_LENGTH:
            raise InvalidParameterError("prediction", given, f"text of at most {MAX_PREDICTION_LENGTH} characters")
        return given
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidParameterError("prediction", given, "text or a list of token ids")
    ids = cast("Sequence[object]", given)
    if len(ids) > MAX_PREDICTION_TOKENS:
        raise InvalidParameterError("prediction", ids, f"a list of at most {MAX_PREDICTION_TOKENS} token ids")
    return tuple(check_integer(f"prediction[{index}]", token, 0, 2**32 - 1) for index, token in enumerate(ids))


def _checked(name: str, value: object, high: int) -> int:
    return check_integer(f"speculative_config.{name}", value, 1, high)


def _content(given: Mapping[object, object]) -> str:
    """Returns the text of OpenAI's object, whose content is text or a list of text parts."""
    content = given.get("content")
    if given.get("type") == "content" and set(given) == {"type", "content"}:
        if isinstance(content, str):
            return content
        if isinstance(content, Sequence):
            texts = [_part(part) for part in cast("Sequence[object]", content)]
            if None not in texts:
                return "".join(cast("list[str]", texts))
    requirement = '{"type": "content", "content": text or a list of {"type": "text", "text": ...}}'
    raise InvalidParameterError("prediction", given, requirement)


def _part(part: object) -> str | None:
    if not isinstance(part, Mapping):
        return None
    fields = cast("Mapping[object, object]", part)
    text = fields.get("text")
    return text if fields.get("type") == "text" and isinstance(text, str) else None
