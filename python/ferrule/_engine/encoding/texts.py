"""Reads texts to embed, classify or rank as token ids, and splits them into portions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, cast

from ferrule._text.prompt import IMAGES, Prompt, check_token_ids, prompt_parts
from ferrule._text.tokenizer import Tokenizer, TokenLimit
from ferrule._validation import check_integer, shown
from ferrule.errors import InvalidParameterError, PromptError


class TypedTokensPrompt(TypedDict):
    """A text as token ids and token type ids, for models that distinguish the two texts of a pair by type."""

    prompt_token_ids: Sequence[int]
    token_type_ids: Sequence[int]


TextInput: TypeAlias = Prompt | TypedTokensPrompt
TextOrPair: TypeAlias = TextInput | tuple[str, str]


@dataclass(frozen=True)
class Text:
    """A text as token ids."""

    token_ids: list[int]
    token_type_ids: list[int] = field(default_factory=list[int])
    """Token type ids; empty where all are 0."""
    cache_salt: str | None = None


@dataclass(frozen=True)
class TextReader:
    """Reads texts for one model. A text that is too long is an error unless truncation is requested."""

    tokenizer: Tokenizer
    vocab_size: int
    token_types: int
    """Number of token types of the model."""
    limit: int
    """Maximum number of tokens of a text, special tokens included."""
    limited_by: str
    """Source of the limit, for messages."""
    lower_case: bool
    """Whether texts are lower-cased before tokenization."""

    def most(self, truncate_prompt_tokens: object) -> int | None:
        """Returns the number of tokens to which texts are truncated; None for no truncation.

        Raises InvalidParameterError.
        """
        if truncate_prompt_tokens is None:
            return None
        most = check_integer("truncate_prompt_tokens", truncate_prompt_tokens, -1, self.limit)
        if most == 0:
            raise InvalidParameterError("truncate_prompt_tokens", most, f"-1 or an integer from 1 to {self.limit}")
        return self.limit if most == -1 else most

    def read(
        self, where: str, given: object, *, prefix: str = "", most: int | None = None, no_tokens: bool = False
    ) -> Text:
        """Reads a text and puts `prefix` before it; `where` is its name in errors.

        `no_tokens` allows a text without tokens: an empty one, if the tokenizer adds no special tokens.

        Raises PromptError, TokenizerError.
        """
        try:
            return self._read(given, prefix, most, no_tokens)
        except PromptError as error:
            raise PromptError(f"{where}: {error}", field=error.field or where) from None

    def read_pair(self, where: str, pair: tuple[object, ...], *, most: int | None = None) -> Text:
        """Reads a pair of texts as one.

        Raises PromptError, TokenizerError.
        """
        first, second = pair if len(pair) == 2 else (None, None)
        if not isinstance(first, str) or not isinstance(second, str):
            raise PromptError(f"{where} must be a string or a pair of strings, got {shown(pair)}", field=where)
        try:
            ids, types = self.tokenizer.encode_text(
                self._prepared(first), self._prepared(second), most=most, limit=self._token_limit
            )
            return self._checked(Text(ids, self._token_types(types)))
        except PromptError as error:
            raise PromptError(f"{where}: {error}", field=error.field or where) from None

    def _read(self, given: object, prefix: str, most: int | None, no_tokens: bool) -> Text:
        kinds: object = ()
        if isinstance(given, Mapping) and "token_type_ids" in given:
            fields = dict(cast("Mapping[str, object]", given))
            kinds = fields.pop("token_type_ids")
            if "prompt_token_ids" not in fields:
                raise PromptError("token_type_ids require prompt_token_ids", field="token_type_ids")
            given = fields
        parts = prompt_parts(cast("object", given))
        if parts.suffix is not None:
            raise PromptError(
                "suffix is not supported for texts to encode; it applies to prompts of generate", field="suffix"
            )
        if parts.images:
            raise PromptError(f"{IMAGES} is not supported for texts to encode", field=IMAGES)
        if parts.text is not None and parts.token_ids is None:
            ids, types = self.tokenizer.encode_text(
                self._prepared(parts.text, prefix), most=most, limit=self._token_limit
            )
            read = Text(ids, self._token_types(types), parts.cache_salt)
            return read if no_tokens and not ids else self._checked(read)
        ids, types = check_token_ids(parts.token_ids, self.vocab_size), check_token_types(kinds, self.token_types)
        if types and len(types) != len(ids):
            raise PromptError(f"token_type_ids must have {len(ids)} entries, got {len(types)}", field="token_type_ids")
        return self._checked(Text(ids[:most], types[:most], parts.cache_salt))

    def _prepared(self, text: str, prefix: str = "") -> str:
        return (prefix + text).lower() if self.lower_case else prefix + text

    def _token_types(self, types: list[int]) -> list[int]:
        """Returns the tokenizer's token type ids; empty for a model without types."""
        return check_token_types(types, self.token_types) if self.token_types > 1 and any(types) else []

    def _checked(self, text: Text) -> Text:
        tokens = len(text.token_ids)
        if not tokens:
            raise PromptError("the text has no tokens")
        if tokens > self.limit:
            raise self._token_limit.exceeded(tokens)
        return text

    @property
    def _token_limit(self) -> TokenLimit:
        return TokenLimit(
            self.limit,
            f"the text has {{found}} tokens, more than the limit of {self.limit} ({self.limited_by}); "
            "truncate_prompt_tokens=-1 truncates it",
        )


def portions(texts: Iterable[Text], tokens: int, count: int) -> Iterator[list[Text]]:
    """Splits texts into portions of at most `tokens` tokens (or one text) and `count` texts.

    Other requests can run between two portions.
    """
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
    """Returns token type ids, each below `count`.

    Raises PromptError.
    """
    if isinstance(types, (str, bytes)) or not isinstance(types, Sequence):
        raise PromptError(f"token_type_ids must be a list of integers, got {shown(types)}", field="token_type_ids")
    try:
        several = cast("Sequence[object]", types)
        return [check_integer(f"token_type_ids[{i}]", each, 0, count - 1) for i, each in enumerate(several)]
    except InvalidParameterError as error:
        raise PromptError(str(error), field=error.field) from None
