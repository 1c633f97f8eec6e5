"""Texts that are embedded, classified or ranked, as callers give them and as the model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, cast

from ferrule._text.prompt import Prompt, check_token_ids, prompt_parts
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import check_whole, shown
from ferrule.errors import InvalidParameterError, PromptError


class TypedTokensPrompt(TypedDict):
    """A text as token ids and the kind of each, for models that tell the texts of a pair apart by it."""

    prompt_token_ids: Sequence[int]
    token_type_ids: Sequence[int]


TextInput: TypeAlias = Prompt | TypedTokensPrompt
TextOrPair: TypeAlias = TextInput | tuple[str, str]


@dataclass(frozen=True)
class Text:
    """A text as the model reads it."""

    token_ids: list[int]
    token_type_ids: list[int] = field(default_factory=list[int])
    """Empty where all are of the first kind."""
    cache_salt: str | None = None


@dataclass(frozen=True)
class TextReader:
    """Turns what callers give into what the model reads. What is too long is an error unless it says to cut it."""

    tokenizer: Tokenizer
    vocab_size: int
    token_types: int
    """Kinds of tokens that the model tells apart."""
    limit: int
    """Tokens of a text, special tokens included."""
    limited_by: str
    lower_case: bool
    """Whether texts become lower case first."""

    def most(self, truncate_prompt_tokens: object) -> int | None:
        """To how many tokens texts are cut; None where they are not.

        Raises InvalidParameterError.
        """
        if truncate_prompt_tokens is None:
            return None
        most = check_whole("truncate_prompt_tokens", truncate_prompt_tokens, -1, self.limit)
        if most == 0:
            raise InvalidParameterError(f"truncate_prompt_tokens is 0; it must be -1, or from 1 to {self.limit}")
        return self.limit if most == -1 else most

    def read(self, where: str, given: object, *, prefix: str = "", most: int | None = None) -> Text:
        """A text, after `prefix`; `where` is its name in errors.

        Raises PromptError, TokenizerError.
        """
        try:
            return self._read(given, prefix, most)
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from None

    def read_pair(self, where: str, pair: tuple[object, ...], *, most: int | None = None) -> Text:
        """Two texts, as one.

        Raises as `read`.
        """
        first, second = pair if len(pair) == 2 else (None, None)
        if not isinstance(first, str) or not isinstance(second, str):
            raise PromptError(f"{where}: a pair of texts is {shown(pair)}; it must be two strings")
        try:
            ids, types = self.tokenizer.encode_text(self._prepared(first), self._prepared(second), most=most)
            return self._checked(Text(ids, self._told_apart(types)))
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from None

    def _read(self, given: object, prefix: str, most: int | None) -> Text:
        kinds: object = ()
        if isinstance(given, Mapping) and "token_type_ids" in given:
            fields = dict(cast("Mapping[str, object]", given))
            kinds = fields.pop("token_type_ids")
            if "prompt_token_ids" not in fields:
                raise PromptError("token_type_ids stand beside prompt_token_ids alone")
            given = fields
        parts = prompt_parts(cast("object", given))
        if parts.suffix is not None:
            raise PromptError(f"suffix is {shown(parts.suffix)}; only prompts that are to be continued can have one")
        if parts.text is not None:
            ids, types = self.tokenizer.encode_text(self._prepared(parts.text, prefix), most=most)
            return self._checked(Text(ids, self._told_apart(types), parts.cache_salt))
        ids, types = check_token_ids(parts.token_ids, self.vocab_size), check_token_types(kinds, self.token_types)
        if types and len(types) != len(ids):
            raise PromptError(f"there are {len(types)} token_type_ids; it must be one for each of {len(ids)} tokens")
        return self._checked(Text(ids[:most], types[:most], parts.cache_salt))

    def _prepared(self, text: str, prefix: str = "") -> str:
        if not text:
            raise PromptError("the text is empty; it must have at least one character")
        return (prefix + text).lower() if self.lower_case else prefix + text

    def _told_apart(self, types: list[int]) -> list[int]:
        """The kinds that a tokenizer gives, where the model has any use for them."""
        return check_token_types(types, self.token_types) if self.token_types > 1 and any(types) else []

    def _checked(self, text: Text) -> Text:
        tokens = len(text.token_ids)
        if not tokens:
            raise PromptError("the text is empty; it must have at least one token")
        if tokens > self.limit:
            raise PromptError(
                f"the text has {tokens} tokens; the limit is {self.limit} ({self.limited_by}). "
                "truncate_prompt_tokens=-1 cuts it there"
            )
        return text


def portions(texts: Iterable[Text], tokens: int, count: int) -> Iterator[list[Text]]:
    """Texts in portions that others need not wait long for: `tokens` at the most, or one text, and `count` texts."""
    portion: list[Text] = []
    left = tokens
    for text in texts:
        if portion and (len(text.token_ids) > left or len(portion) == count):
            yield portion
            portion, left = [], tokens
        portion.append(text)
        left -= len(text.token_ids)
    if portion:
        yield portion


def check_token_types(types: object, count: int) -> list[int]:
    """Kinds of tokens, each below `count`.

    Raises PromptError.
    """
    if isinstance(types, (str, bytes)) or not isinstance(types, Sequence):
        raise PromptError(f"token_type_ids is {shown(types)}; it must be a list of whole numbers")
    try:
        several = cast("Sequence[object]", types)
        return [check_whole(f"token_type_ids[{i}]", each, 0, count - 1) for i, each in enumerate(several)]
    except InvalidParameterError as error:
        raise PromptError(str(error)) from None
