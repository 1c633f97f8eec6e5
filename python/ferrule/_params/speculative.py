"""What an engine guesses by: vLLM's `speculative_config`, and the prediction that a request brings along."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ferrule._validation import check_whole, shown
from ferrule.errors import InvalidParameterError

METHODS = ("ngram", "draft_model")
"""Where drafts come from: what followed the same tokens before, or a smaller model."""
MAX_SPECULATIVE_TOKENS = 64
"""Drafts of a sequence in a step."""
MAX_PROMPT_LOOKUP = 64
"""Tokens that a prompt lookup compares."""
NUM_SPECULATIVE_TOKENS = {"ngram": 15, "draft_model": 7}
"""With the token that they follow they are as many rows as the matmuls of few rows take at once: the most, or half of
them where drafts have their price."""
PROMPT_LOOKUP_MIN, PROMPT_LOOKUP_MAX = 2, 8
MAX_PREDICTION_LENGTH = 1 << 22
"""Characters of a prediction that is text."""
MAX_PREDICTION_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, for all requests of an engine. They never change a token.

    Raises InvalidParameterError for a value outside its limits.
    """

    method: str
    """One of METHODS."""
    num_speculative_tokens: int
    """Drafts of a sequence in a step, at the most."""
    adaptive: bool = True
    """Whether there are fewer where they are not worth their time; else always as many as there are."""
    prompt_lookup_min: int = PROMPT_LOOKUP_MIN
    """Tokens that must have stood before, of the method `ngram`."""
    prompt_lookup_max: int = PROMPT_LOOKUP_MAX
    """Tokens that are compared, at the most: the longest match wins."""
    model: str | None = None
    """The draft model, a directory or `org/repo` like any model; its vocabulary is that of the model."""
    quantization: str = "auto"
    """Of the draft model."""
    revision: str | None = None
    """Of the draft model on the hub."""

    @classmethod
    def read(cls, given: object) -> SpeculativeConfig | None:
        """Reads a mapping of these fields; None for no speculation.

        Fields with a default may be left out, so may `num_speculative_tokens`, and beside a `model` the method.

        Raises InvalidParameterError.
        """
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise InvalidParameterError(f"speculative_config is {shown(given)}; it must be a mapping")
        fields = {str(name): value for name, value in cast("Mapping[object, object]", given).items()}
        for name in fields:
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise InvalidParameterError(f"speculative_config has {shown(name)}; it may have {known}")
        method = fields.get("method") or ("draft_model" if fields.get("model") else None)
        if method not in METHODS:
            raise InvalidParameterError(
                f"speculative_config's method is {shown(method)}; it must be one of {', '.join(METHODS)}"
            )
        fields["method"] = method
        if fields.get("num_speculative_tokens") is None:
            fields["num_speculative_tokens"] = NUM_SPECULATIVE_TOKENS[cast("str", method)]
        # Whoever gives one bound alone means no conflict with the other's default.
        if fields.get("prompt_lookup_max") is not None and fields.get("prompt_lookup_min") is None:
            longest = check_whole("prompt_lookup_max", fields["prompt_lookup_max"], 1, MAX_PROMPT_LOOKUP)
            fields["prompt_lookup_min"] = min(PROMPT_LOOKUP_MIN, longest)
        elif fields.get("prompt_lookup_min") is not None and fields.get("prompt_lookup_max") is None:
            shortest = check_whole("prompt_lookup_min", fields["prompt_lookup_min"], 1, MAX_PROMPT_LOOKUP)
            fields["prompt_lookup_max"] = max(PROMPT_LOOKUP_MAX, shortest)
        return cls(**cast("Any", {name: value for name, value in fields.items() if value is not None}))

    def __post_init__(self) -> None:
        check_whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        longest = check_whole("prompt_lookup_max", self.prompt_lookup_max, 1, MAX_PROMPT_LOOKUP)
        check_whole("prompt_lookup_min", self.prompt_lookup_min, 1, longest)
        if not isinstance(cast("object", self.adaptive), bool):
            raise InvalidParameterError(f"adaptive is {shown(self.adaptive)}; it must be True or False")
        if self.method == "draft_model":
            model = cast("object", self.model)
            if not isinstance(model, (str, os.PathLike)):
                raise InvalidParameterError(
                    f"speculative_config's model is {shown(model)}; the method draft_model needs the path of one"
                )
            object.__setattr__(self, "model", os.fspath(cast("os.PathLike[str]", model)))
        elif self.model is not None:
            raise InvalidParameterError(
                f"speculative_config's model is {shown(self.model)}; the method {self.method} has none"
            )

    def engine_options(self) -> dict[str, Any]:
        """As the native module reads it; the draft model is given to it by itself."""
        lookup = [self.prompt_lookup_min, self.prompt_lookup_max] if self.method == "ngram" else None
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompt_lookup": lookup,
            "adaptive": self.adaptive,
        }


def check_prediction(given: object) -> str | tuple[int, ...] | None:
    """What a caller expects to come: text, token ids, or OpenAI's `{"type": "content", "content": …}`.

    Raises InvalidParameterError.
    """
    if isinstance(given, Mapping):
        given = _content(cast("Mapping[object, object]", given))
    if given is None:
        return None
    if isinstance(given, str):
        if len(given) > MAX_PREDICTION_LENGTH:
            raise InvalidParameterError(f"prediction has {len(given)} characters; the limit is {MAX_PREDICTION_LENGTH}")
        return given
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidParameterError(f"prediction is {shown(given)}; it must be text or a list of token ids")
    ids = cast("Sequence[object]", given)
    if len(ids) > MAX_PREDICTION_TOKENS:
        raise InvalidParameterError(f"prediction has {len(ids)} tokens; the limit is {MAX_PREDICTION_TOKENS}")
    return tuple(check_whole(f"prediction[{index}]", token, 0, 2**32 - 1) for index, token in enumerate(ids))


def _content(given: Mapping[object, object]) -> str:
    """The text of OpenAI's form, whose content is a string or a list of parts of text."""
    content = given.get("content")
    if given.get("type") == "content" and set(given) == {"type", "content"}:
        if isinstance(content, str):
            return content
        if isinstance(content, Sequence):
            texts = [_part(part) for part in cast("Sequence[object]", content)]
            if None not in texts:
                return "".join(cast("list[str]", texts))
    limit = '{"type": "content", "content": text or a list of {"type": "text", "text": …}}'
    raise InvalidParameterError(f"prediction is {shown(given)}; a mapping must be {limit}")


def _part(part: object) -> str | None:
    if not isinstance(part, Mapping):
        return None
    fields = cast("Mapping[object, object]", part)
    text = fields.get("text")
    return text if fields.get("type") == "text" and isinstance(text, str) else None
