"""Tokens to text, one at a time: whole characters only, and in constant time a token.

Two kinds of tokenizer cover nearly all language models, and both spell out bytes: GPT-2's byte-level alphabet, and
SentencePiece's pieces with `<0xNN>` for what has no piece. For these a token is its bytes, and an incremental UTF-8
decoder holds back what may still become a character. Anything else is decoded in a sliding window.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_WINDOW = 16
"""Tokens after which an incomplete character is taken for a broken one."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8: so many tokens at most it spreads over."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Turns a stream of tokens into text."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes, empty where a character is still incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        ...


class Pieces(Protocol):
    """The bytes that a token stands for."""

    strip_first_space: bool
    """Whether a text's first space is dropped: SentencePiece puts one there."""

    def read(self, token: str) -> bytes:
        """The bytes of a token as it is written in the vocabulary."""
        ...


class ByteLevelPieces:
    """GPT-2's alphabet, in which every byte is a printable character."""

    strip_first_space = False

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(0x100) if byte not in set(printable)]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(0x100 + index): byte for index, byte in enumerate(others)}

    def read(self, token: str) -> bytes:
        """The bytes of a token."""
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:  # an added token, written as it is
            return token.encode()


class SentencePiecePieces:
    """Pieces with a visible space, and single bytes as `<0xNN>`."""

    def __init__(self, space: str, *, strip_first_space: bool) -> None:
        self._space = space
        self.strip_first_space = strip_first_space

    def read(self, token: str) -> bytes:
        """The bytes of a token."""
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(self._space, " ").encode()


def pieces_for(decoder: str | None) -> Pieces | None:
    """The bytes behind tokens for a decoder of tokenizer.json; None where it is neither of the two kinds."""
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
    """For tokens that stand for bytes; `lookup` gives those of an id."""

    def __init__(self, lookup: Callable[[int], bytes], prompt: Sequence[int], *, strip_first_space: bool) -> None:
        self._lookup = lookup
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_first_space and not prompt
        for token_id in prompt[-LONGEST_CHARACTER:]:
            self._utf8.decode(lookup(token_id))

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""
        return self._stripped(self._utf8.decode(self._lookup(token_id)))

    def flush(self) -> str:
        """U+FFFD for an incomplete character."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any tokenizer: decodes the last tokens with and without the new one; the difference is new text."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-LONGEST_CHARACTER:])
        self._known = len(self._ids)

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or (text.endswith(REPLACEMENT) and len(self._ids) - self._known < LONGEST_WINDOW):
            return ""
        del self._ids[: self._known]
        self._known = len(self._ids)
        return text

    def flush(self) -> str:
        """What the last tokens leave."""
        text = self._new_text()
        self._known = len(self._ids)
        return text

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._known])) :]
