"""Incremental detokenization, which returns only whole characters and takes constant time for each token.

Nearly all language models have a tokenizer whose tokens are bytes: in GPT-2's byte-level alphabet, or in
SentencePiece's spelling with `<0xNN>` for single bytes. An incremental UTF-8 decoder holds back their incomplete
characters. The tokens of other tokenizers are decoded in a sliding window.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_WINDOW = 16
"""Number of tokens after which an incomplete character counts as invalid."""
LONGEST_CHARACTER = 4
"""Maximum number of bytes of a UTF-8 character, and so of tokens that it spans."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Converts a stream of tokens to text."""

    def feed(self, token_id: int) -> str:
        """Returns the text that a token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Returns the remaining text at the end: U+FFFD for an incomplete character."""
        ...


class Pieces(Protocol):
    """Mapping from the vocabulary's spelling of tokens to bytes."""

    strip_first_space: bool
    """Whether the first space of a text is removed, because SentencePiece added it."""
    spells_added_tokens: bool
    """Whether added tokens are in the vocabulary's spelling; otherwise they are plain text."""

    def read(self, token: str) -> bytes:
        """Returns the bytes of a token in the vocabulary's spelling."""
        ...


class ByteLevelPieces:
    """GPT-2's byte-level alphabet: every byte is a printable character."""

    strip_first_space = False
    spells_added_tokens = False

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(0x100) if byte not in set(printable)]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(0x100 + index): byte for index, byte in enumerate(others)}

    def read(self, token: str) -> bytes:
        """Returns the bytes of a token."""
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:  # a token that another tool added to the vocabulary as plain text
            return token.encode()


class SentencePiecePieces:
    """SentencePiece's spelling: a visible character for the space, and `<0xNN>` for single bytes."""

    spells_added_tokens = True

    def __init__(self, space: str, *, strip_first_space: bool) -> None:
        self._space = space
        self.strip_first_space = strip_first_space

    def read(self, token: str) -> bytes:
        """Returns the bytes of a token."""
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(self._space, " ").encode()


def pieces_for(decoder: str | None) -> Pieces | None:
    """Returns the mapping for the `decoder` of a tokenizer.json; None if its tokens are not bytes."""
    description: dict[str, Any] = json.loads(decoder) if decoder else {}
    steps: list[dict[str, Any]] = description.get("decoders", [description])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelPieces()
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace, strip = steps[0], (steps[3] if len(steps) == 4 else None)
        space = replace.get("pattern", {}).get("String")
        plain_strip = strip is None or (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0)
        if space and replace.get("content") == " " and plain_strip:
            return SentencePiecePieces(space, strip_first_space=strip is not None)
    return None


class ByteDetokenizer:
    """Detokenizer for tokens that are bytes; `lookup` returns the bytes of an id."""

    def __init__(self, lookup: Callable[[int], bytes], prompt: Sequence[int], *, strip_first_space: bool) -> None:
        self._lookup = lookup
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_first_space and not prompt
        for token_id in prompt[-LONGEST_CHARACTER:]:
            self._utf8.decode(lookup(token_id))

    def feed(self, token_id: int) -> str:
        """Returns the text that a token completes."""
        return self._stripped(self._utf8.decode(self._lookup(token_id)))

    def flush(self) -> str:
        """Returns U+FFFD for an incomplete character."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Detokenizer for other tokenizers. It decodes the last tokens with and without the new one and compares."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-LONGEST_CHARACTER:])
        self._known = len(self._ids)

    def feed(self, token_id: int) -> str:
        """Returns the text that a token completes."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or (text.endswith(REPLACEMENT) and len(self._ids) - self._known < LONGEST_WINDOW):
            return ""
        del self._ids[: self._known]
        self._known = len(self._ids)
        return text

    def flush(self) -> str:
        """Returns the remaining text of the last tokens."""
        text = self._new_text()
        self._known = len(self._ids)
        return text

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._known])) :]
