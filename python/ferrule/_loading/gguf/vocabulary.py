"""Vocabulary of a GGUF file: tokens with checked types, scores and merges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

from ferrule._validation import shown
from ferrule.archs.config import Config
from ferrule.errors import TokenizerError

TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
SCORES = "tokenizer.ggml.scores"
MERGES = "tokenizer.ggml.merges"
MAX_TOKEN_LENGTH = 4096
"""Maximum number of characters of a token. The longest known tokens are 1,024 spaces; some steps take quadratic
time."""
MAX_CHARACTERS = 16 << 20
"""Maximum number of characters of all tokens together; the largest known vocabularies have 2 million."""


class TokenType(IntEnum):
    """Token types in SentencePiece's numbering."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TYPES = frozenset(TokenType)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a GGUF file by id."""

    metadata: Config
    tokens: list[str]
    """Texts of the tokens, all different; an empty token gets a text with its id."""
    types: list[int]
    """TokenType of each token."""
    ids: dict[str, int]

    def of_type(self, *kinds: TokenType) -> list[int]:
        """Returns the ids of the tokens of these types."""
        return [token_id for token_id, kind in enumerate(self.types) if kind in kinds]

    def scores(self) -> list[float]:
        """Returns the score of each token.

        Raises TokenizerError if scores are missing, too few, or not finite.
        """
        scores = self._list(SCORES, "finite numbers", len(self.tokens))
        # Checks of all elements at once are faster than a loop, which finds the invalid element.
        if {*map(type, scores)} <= {int, float} and all(map(math.isfinite, scores)):
            return scores
        for index, score in enumerate(scores):
            if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
                raise self.fault(f"{SCORES}[{index}]", score, "a finite number")
        return scores

    def merges(self, ids: Mapping[str, int]) -> list[tuple[str, str]]:
        """Returns the merges, highest priority first; all pairs are among `ids`.

        Raises TokenizerError if merges are missing or invalid.
        """
        lines = self._list(MERGES, "pairs of tokens")
        merges: list[tuple[str, str]] = []
        for index, line in enumerate(lines):
            # Search from index 1, since the first token may begin with a space.
            cut = line.find(" ", 1) if isinstance(line, str) else 0
            pair = (line[:cut], line[cut + 1 :]) if cut > 0 else ("", "")
            if pair[0] not in ids or pair[1] not in ids or pair[0] + pair[1] not in ids:
                raise self.fault(
                    f"{MERGES}[{index}]", line, f"two of {TOKENS} separated by a space, whose concatenation is a token"
                )
            merges.append(pair)
        return merges

    def fault(self, key: str, value: object, limit: str) -> TokenizerError:
        """Returns the error for a key or one of its elements."""
        return TokenizerError(f"{self.metadata.file}: {key} must be {limit}, got {shown(value)}")

    def _list(self, key: str, of: str, length: int | None = None) -> list[Any]:
        return read_list(self.metadata, key, of, length)


def read_vocabulary(metadata: Config) -> Vocabulary:
    """Reads the vocabulary of a model.

    Raises TokenizerError for tokens that are not strings or not distinct, and for unknown types.
    """
    tokens = read_list(metadata, TOKENS, "strings")
    if not {*map(type, tokens)} <= {str}:
        index, token = next((index, token) for index, token in enumerate(tokens) if not isinstance(token, str))
        raise TokenizerError(f"{metadata.file}: {TOKENS}[{index}] must be a string, got {token!r}")
    lengths = [*map(len, tokens)]
    if (longest := max(lengths, default=0)) > MAX_TOKEN_LENGTH:
        raise TokenizerError(
            f"{metadata.file}: {TOKENS}[{lengths.index(longest)}] has {longest} characters; the limit is "
            f"{MAX_TOKEN_LENGTH}"
        )
    if (characters := sum(lengths)) > MAX_CHARACTERS:
        raise TokenizerError(f"{metadata.file}: {TOKENS} has {characters} characters; the limit is {MAX_CHARACTERS}")
    if 0 in lengths:
        tokens[:] = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    ids: dict[str, int] = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        first, text = next((index, token) for index, token in enumerate(tokens) if ids[token] != index)
        raise TokenizerError(
            f"{metadata.file}: {TOKENS}[{ids[text]}] must be unique, got {text!r}, which is also {TOKENS}[{first}]"
        )
    if TYPES not in metadata:
        return Vocabulary(metadata, tokens, [TokenType.NORMAL] * len(tokens), ids)
    types = read_list(metadata, TYPES, "integers", len(tokens))
    if {*map(type, types)} <= {int} and _TYPES.issuperset(types):
        return Vocabulary(metadata, tokens, types, ids)
    for index, kind in enumerate(types):
        if type(kind) is not int or kind not in _TYPES:
            raise TokenizerError(
                f"{metadata.file}: {TYPES}[{index}] must be an integer from 0 to {max(_TYPES)}, got {shown(kind)}"
            )
    return Vocabulary(metadata, tokens, types, ids)


def read_list(metadata: Config, key: str, of: str, length: int | None = None) -> list[Any]:
    """Reads a list of the metadata, with `length` elements if given.

    Raises TokenizerError.
    """
    value: object = metadata.values.get(key)
    if not isinstance(value, list):
        found = f"got {shown(value)}" if key in metadata.values else "but it is missing"
        raise TokenizerError(f"{metadata.file}: {key} must be a list of {of}, {found}")
    elements = cast("list[Any]", value)
    if length is not None and len(elements) != length:
        raise TokenizerError(
            f"{metadata.file}: {key} must have {length} elements, one for each token, got {len(elements)}"
        )
    return elements
