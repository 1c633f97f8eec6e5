"""Prompts as callers give them: text, or token ids, checked against the model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias, TypedDict, cast

from ferrule.checks import shown
from ferrule.errors import PromptError
from ferrule.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


class TextPrompt(TypedDict):
    """A prompt as text, in vLLM's other spelling."""

    prompt: str


Prompt: TypeAlias = str | TokensPrompt | TextPrompt


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as ids, and its text where that is what was given."""

    text: str | None
    token_ids: list[int]


def read_prompt(
    given: object, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int, limited_by: str
) -> ReadPrompt:
    """A prompt of either form.

    Raises PromptError, TokenizerError.
    """
    prompt = given
    if isinstance(given, Mapping):
        keys = cast("Mapping[str, object]", given)
        if set(keys) == {"prompt_token_ids"}:
            token_ids = check_token_ids(keys["prompt_token_ids"], vocab_size)
            return ReadPrompt(None, _check_length(token_ids, max_model_len, limited_by))
        if set(keys) == {"prompt"}:
            prompt = keys["prompt"]
    if not isinstance(prompt, str):
        raise PromptError(
            f'a prompt is {shown(cast("object", given))}; it must be a string or {{"prompt_token_ids": [...]}}'
        )
    token_ids = check_token_ids(tokenizer.encode(prompt), vocab_size)
    return ReadPrompt(prompt, _check_length(token_ids, max_model_len, limited_by))


def check_token_ids(token_ids: object, vocab_size: int, *, may_be_empty: bool = False) -> list[int]:
    """Token ids, at least one unless said otherwise, each of the vocabulary.

    Raises PromptError.
    """
    try:
        # Bytes, sets and maps give numbers too, but nobody means those as a prompt.
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
