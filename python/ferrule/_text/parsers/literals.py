"""Parser of Python literals in calls. Python's own parser is not used, since hostile text can exhaust its memory.

The parser supports strings with escapes, numbers, True, False, None, lists, tuples and dicts (The Python Language
Reference, 2.4.1 and 6.2), and JSON's true, false and null.
"""

from __future__ import annotations

import json
import math
import re
from typing import TypeAlias

Literal: TypeAlias = "str | int | float | bool | list[Literal] | dict[str, Literal] | None"

MAX_DEPTH = 64
"""Maximum nesting depth of lists and dicts."""
MAX_BITS = 2048
"""Maximum number of bits of an integer, since the conversion to decimal takes quadratic time."""

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>[rRuU]?(?:'''(?:[^'\\]|\\.|'(?!''))*'''|\"\"\"(?:[^"\\]|\\.|"(?!""))*\"\"\"
                            |'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
        |(?P<number>[-+]?\.?\d(?:[\w.]|(?<=[eE])[-+])*)
        |(?P<word>[A-Za-z_]\w*)
        |(?P<mark>[\[\](){}:,]))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_SINGLE = dict(zip("abfnrtv\\'\"\n", "\a\b\f\n\r\t\v\\'\"", strict=False)) | {"\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def read_literal(text: str) -> Literal:
    """Returns the value of a literal; tuples become lists, and keys of dicts become strings.

    Raises ValueError for text that is not a literal.
    """
    tokens = _Tokens(text)
    value = _value(tokens, MAX_DEPTH)
    if tokens.kind is not None:
        raise ValueError(text)
    return value


def whole_characters(text: str) -> str:
    """Joins surrogate pairs of a text, and replaces lone surrogates by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Tokens:
    """Tokens of a text; `kind` is None at the end."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._position = 0
        self.kind: str | None = None
        self.symbol = ""
        self.advance()

    def advance(self) -> None:
        if self._position == len(self._text):
            self.kind, self.symbol = None, ""
            return
        found = _TOKEN.match(self._text, self._position)
        if found is None or found.lastgroup is None:
            raise ValueError(self._text)
        self.kind, self.symbol, self._position = found.lastgroup, found[found.lastgroup], found.end()

    def take(self, mark: str) -> bool:
        """Reads `mark` if it is the next token; returns whether it was."""
        if self.kind != "mark" or self.symbol != mark:
            return False
        self.advance()
        return True


def _value(tokens: _Tokens, depth: int) -> Literal:
    kind, symbol = tokens.kind, tokens.symbol
    tokens.advance()
    match kind:
        case "string":
            pieces = [_unescaped(symbol)]
            while tokens.kind == "string":  # adjacent strings are concatenated
                pieces.append(_unescaped(tokens.symbol))
                tokens.advance()
            return "".join(pieces)
        case "number":
            return _number(symbol)
        case "word" if symbol in _WORDS:
            return _WORDS[symbol]
        case "mark" if symbol in _CLOSERS and depth:
            return _dict(tokens, depth - 1) if symbol == "{" else _list(tokens, symbol, depth - 1)
        case _:
            raise ValueError(symbol)


def _list(tokens: _Tokens, opener: str, depth: int) -> Literal:
    values: list[Literal] = []
    comma = False
    while not tokens.take(_CLOSERS[opener]):
        if values and not comma:
            raise ValueError(tokens.symbol)
        values.append(_value(tokens, depth))
        comma = tokens.take(",")
    return values[0] if opener == "(" and len(values) == 1 and not comma else values


def _dict(tokens: _Tokens, depth: int) -> Literal:
    values: dict[str, Literal] = {}
    comma = True
    while not tokens.take("}"):
        if not comma:
            raise ValueError(tokens.symbol)
        key = _value(tokens, depth)
        if isinstance(key, (list, dict)) or not tokens.take(":"):
            raise ValueError(tokens.symbol)
        values[_key(key)] = _value(tokens, depth)
        comma = tokens.take(",")
    return values


def _key(value: str | float | bool | None) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(token: str) -> int | float:
    try:
        whole = int(token, 0)
    except ValueError:
        value = float(token)
    else:
        if whole.bit_length() > MAX_BITS:
            raise ValueError(token)
        return whole
    if not math.isfinite(value) or token.lstrip("-+").isdigit():
        raise ValueError(token)  # JSON has no infinity, and Python has no numbers like 007
    return value


def _unescaped(token: str) -> str:
    raw = token[0] in "rR"
    token = token.lstrip("rRuU")
    quotes = 3 if token.startswith(("'''", '"""')) else 1
    content = token[quotes:-quotes]
    return content if raw else whole_characters(_ESCAPE.sub(_character, content))


def _character(escape: re.Match[str]) -> str:
    single = escape[5]
    if single is not None:
        return _SINGLE.get(single, escape[0])
    octal = escape[4]
    code = int(octal, 8) if octal is not None else int(escape[1] or escape[2] or escape[3], 16)
    return chr(code) if code < 0x110000 else escape[0]
