"""Prompts as text or token ids, checked against the model's limits."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NotRequired, TypeAlias, TypedDict, cast

from ferrule._text.fim import encode_infill
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import shown
from ferrule.errors import PromptError

MAX_SALT_LENGTH = 256
"""Characters of a cache salt."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]
    """Prompts share their cached prefixes only with those of the same salt; up to 256 characters."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    suffix: NotRequired[str]
    """Text after the completion, for models with fill-in-the-middle tokens."""
    cache_salt: NotRequired[str]
    """Same as in TokensPrompt."""


Prompt: TypeAlias = str | TokensPrompt | TextPrompt


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as ids, with its text if given (the text before the middle with a suffix)."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output of this prompt, besides the model's EOS tokens."""


@dataclass(frozen=True)
class PromptParts:
    """Fields of a prompt with checked types; the ids are not checked yet."""

    text: str | None = None
    token_ids: object = None
    suffix: str | None = None
    cache_salt: str | None = None


def read_prompt(
    given: object, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int, limited_by: str
) -> ReadPrompt:
    """Reads a prompt in either form.

    Raises PromptError, TokenizerError.
    """
    parts = prompt_parts(given)
    stop_token_ids: tuple[int, ...] = ()
    if parts.text is None:
        ids = parts.token_ids
    elif parts.suffix is None:
        ids = tokenizer.encode(parts.text)
    else:
        infill = encode_infill(tokenizer, parts.text, parts.suffix)
        ids, stop_token_ids = infill.token_ids, tuple(each for each in infill.stop_token_ids if each < vocab_size)
    token_ids = _check_length(check_token_ids(ids, vocab_size), max_model_len, limited_by)
    return ReadPrompt(parts.text, token_ids, parts.cache_salt, stop_token_ids)


def prompt_parts(given: object) -> PromptParts:
    """Splits a prompt in either form into its fields.

    Raises PromptError.
    """
    if isinstance(given, str):
        return PromptParts(text=given)
    if not isinstance(given, Mapping) or not (
        {"prompt", "prompt_token_ids"} & set(cast("Mapping[object, object]", given))
    ):
        found = shown(cast("object", given))
        raise PromptError(f'a prompt is {found}; it must be a string or {{"prompt_token_ids": [...]}}')
    keys = dict(cast("Mapping[str, object]", given))
    salt = _checked_salt(keys.pop("cache_salt")) if "cache_salt" in keys else None
    content = "prompt" if "prompt" in keys else "prompt_token_ids"
    value = keys.pop(content)
    suffix = keys.pop("suffix", None) if content == "prompt" else None
    if keys:
        found = shown(next(iter(keys)))
        others = "suffix and cache_salt" if content == "prompt" else "cache_salt"
        raise PromptError(f"a prompt with {content} has the field {found}; beside {content} it can have {others}")
    if content == "prompt_token_ids":
        return PromptParts(token_ids=value, cache_salt=salt)
    if not isinstance(value, str):
        raise PromptError(f"prompt is {shown(value)}; it must be a string")
    if suffix is not None and not isinstance(suffix, str):
        raise PromptError(f"suffix is {shown(suffix)}; it must be a string")
    if suffix is not None:
        _check_unicode("suffix", suffix)
    return PromptParts(text=value, suffix=suffix, cache_salt=salt)


def _checked_salt(salt: object) -> str:
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise PromptError(f"cache_salt is {shown(salt)}; it must be a string of 1 to {MAX_SALT_LENGTH} characters")
    _check_unicode("cache_salt", salt)
    return salt


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{field} is {shown(text)}, with a lone surrogate; it must be valid Unicode") from None


def check_token_ids(token_ids: object, vocab_size: int, *, may_be_empty: bool = False) -> list[int]:
    """Token ids, at least one unless said otherwise, each of the vocabulary.

    Raises PromptError.
    """
    try:
        # Bytes, sets and maps iterate over numbers too, but are mistakes.
        if isinstance(token_ids, (bytes, bytearray, Set, Mapping)):
            raise TypeError
        ids = [operator.index(token) for token in cast("Iterable[int]", token_ids)]
    except TypeError:
        found = shown(cast("object", token_ids))
        raise PromptError(f"prompt_token_ids is {found}; it must be a list of whole numbers") from None
    if not ids:
        if may_be_empty:
            return ids
        raise PromptError("the prompt is empty; it must have at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise PromptError(
            f"prompt_token_ids[{position}] is {shown(ids[position])}; the vocabulary has ids from 0 to {vocab_size - 1}"
        )
    return ids


def _check_length(token_ids: list[int], max_model_len: int, limited_by: str) -> list[int]:
    if len(token_ids) >= max_model_len:
        raise PromptError(
            f"the prompt has {len(token_ids)} tokens; {limited_by} allows {max_model_len} in all, so that the limit is "
            f"{max_model_len - 1} and one can follow"
        )
    return token_ids
