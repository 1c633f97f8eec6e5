"""GBNF, the grammar notation of llama.cpp, translated to Lark, which llguidance compiles.

Every rule of a GBNF grammar becomes a Lark rule. Character classes become regular expressions of one character, so that
no terminal is longer than GBNF allows. The notation is described in llama.cpp's `grammars/README.md`.
"""

from __future__ import annotations

import json
import re

from ferrule.errors import InvalidParameterError

MAX_DEPTH = 100
"""Most parentheses inside each other."""

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<name>[A-Za-z0-9_-]+)
    |(?P<define>::=)
    |(?P<literal>"(?:\\.|[^"\\\n])*")
    |(?P<chars>\[(?:\\.|[^\]\\\n])*\])
    |(?P<repeat>[*+?]|\{[ ]*\d+[ ]*(?:,[ ]*\d*[ ]*)?\})
    |(?P<any>\.)
    |(?P<open>\()|(?P<close>\))|(?P<or>\|)
    |(?P<newline>\n)
    |(?P<space>[ \t\r]+|\#[^\n]*)""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def is_gbnf(grammar: str) -> bool:
    """Returns whether a grammar is GBNF: a rule of Lark has one colon and no equals sign."""
    return _RULE.search(grammar) is not None


def gbnf_to_lark(grammar: str) -> str:
    """Translates a GBNF grammar to Lark; its rule `root` becomes `start`.

    Raises InvalidParameterError.
    """
    return _Translation(grammar).lark()


class _Translation:
    """A grammar while it is translated: recursive descent over its tokens."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._tokens = self._read(grammar)
        self._next = 0
        self._names: dict[str, str] = {"root": "start"}
        """Lark's name of each rule, by its GBNF name."""
        self._referenced: dict[str, int] = {}
        """Line of the first use of each rule."""

    def lark(self) -> str:
        rules: dict[str, str] = {}
        while self._skip_newlines():
            name, line = self._expect("name")
            self._expect("define")
            if name in rules:
                raise self._error(line, f"rule {name} is defined twice")
            self._skip_newlines()
            rules[name] = f"{self._rule_name(name)}: {self._alternatives(0)}"
            if self._peek() not in (None, "newline"):
                raise self._error(self._tokens[self._next][2], f"unexpected {self._tokens[self._next][1]!r}")
        if "root" not in rules:
            raise self._error(1, "there is no rule root")
        for name, line in self._referenced.items():
            if name not in rules:
                raise self._error(line, f"rule {name} is not defined")
        return "\n".join(rules.values()) + "\n"

    def _read(self, grammar: str) -> list[tuple[str, str, int]]:
        tokens: list[tuple[str, str, int]] = []
        position, line = 0, 1
        while position < len(grammar):
            found = _TOKEN.match(grammar, position)
            if found is None or found.lastgroup is None:
                raise self._error(line, f"unexpected {grammar[position]!r}")
            if found.lastgroup != "space":
                tokens.append((found.lastgroup, found.group(), line))
            line += found.lastgroup == "newline"
            position = found.end()
        return tokens

    def _peek(self) -> str | None:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else None

    def _expect(self, kind: str) -> tuple[str, int]:
        if self._peek() != kind:
            line = self._tokens[min(self._next, len(self._tokens) - 1)][2]
            expected = {"name": "a rule's name", "define": "::=", "close": "a closing parenthesis"}[kind]
            raise self._error(line, f"expected {expected}")
        _, text, line = self._tokens[self._next]
        self._next += 1
        return text, line

    def _skip_newlines(self) -> bool:
        """Skips line ends; returns whether anything follows."""
        while self._peek() == "newline":
            self._next += 1
        return self._peek() is not None

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(self._tokens[self._next - 1][2], f"parentheses nest deeper than {MAX_DEPTH} levels")
        alternatives = [self._sequence(depth)]
        while self._continues(depth):
            self._next += 1
            self._skip_newlines()
            alternatives.append(self._sequence(depth))
        return " | ".join(alternatives)

    def _continues(self, depth: int) -> bool:
        """Returns whether another alternative follows, possibly on the next line."""
        ahead = self._next
        while ahead < len(self._tokens) and self._tokens[ahead][0] == "newline":
            ahead += 1
        if ahead < len(self._tokens) and (self._tokens[ahead][0] == "or" or depth):
            self._next = ahead
        return self._peek() == "or"

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while True:
            if depth:
                self._skip_newlines()
            kind = self._peek()
            if kind not in ("name", "literal", "chars", "any", "open"):
                break
            # A name before "::=" on the next line begins another rule.
            part = self._element(depth)
            while self._peek() == "repeat":
                part = f"({part}){self._repetition(self._tokens[self._next][1])}"
                self._next += 1
            parts.append(part)
        return " ".join(parts) or '""'

    def _element(self, depth: int) -> str:
        kind, text, line = self._tokens[self._next]
        self._next += 1
        match kind:
            case "name":
                self._referenced.setdefault(text, line)
                return self._rule_name(text)
            case "literal":
                return json.dumps("".join(map(chr, self._characters(text[1:-1], line))), ensure_ascii=False)
            case "chars":
                return self._character_class(text[1:-1], line)
            case "any":
                return r"/[\x{0}-\x{10FFFF}]/"
            case _:
                inner = self._alternatives(depth + 1)
                self._skip_newlines()
                self._expect("close")
                return f"({inner})"

    @staticmethod
    def _repetition(text: str) -> str:
        return text if text in "*+?" else text.replace(" ", "")

    def _character_class(self, text: str, line: int) -> str:
        negated = text.startswith("^")
        units = self._units(text[negated:], line)
        ranges: list[str] = []
        index = 0
        while index < len(units):
            low, high = units[index][0], units[index][0]
            if index + 2 < len(units) and units[index + 1] == (ord("-"), False):
                high = units[index + 2][0]
                index += 2
            if high < low:
                raise self._error(line, f"the character range {chr(low)}-{chr(high)} is empty")
            ranges.append(f"\\x{{{low:X}}}-\\x{{{high:X}}}" if low != high else f"\\x{{{low:X}}}")
            index += 1
        if not ranges:
            raise self._error(line, "a character class is empty")
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"

    def _characters(self, text: str, line: int) -> list[int]:
        return [code for code, _ in self._units(text, line)]

    def _units(self, text: str, line: int) -> list[tuple[int, bool]]:
        """Returns the code points of a literal or a class, and whether each was escaped."""
        units: list[tuple[int, bool]] = []
        position = 0
        while position < len(text):
            character = text[position]
            position += 1
            if character != "\\":
                units.append((ord(character), False))
                continue
            escape = text[position]
            position += 1
            digits = _HEX_DIGITS.get(escape)
            if digits is None:
                units.append((ord(_ESCAPES.get(escape, escape)), True))
                continue
            code = text[position : position + digits]
            if len(code) != digits or not re.fullmatch("[0-9A-Fa-f]+", code) or int(code, 16) > 0x10FFFF:
                raise self._error(line, f"\\{escape} needs {digits} hexadecimal digits of a character")
            if 0xD800 <= int(code, 16) <= 0xDFFF:
                raise self._error(line, f"\\{escape}{code} is a surrogate, not a character")
            units.append((int(code, 16), True))
            position += digits
        return units

    def _rule_name(self, name: str) -> str:
        if name not in self._names:
            readable = re.sub("[^a-z0-9_]", "_", name.lower())
            self._names[name] = f"r{len(self._names)}_{readable}"
        return self._names[name]

    def _error(self, line: int, problem: str) -> InvalidParameterError:
        return InvalidParameterError(
            "structured_outputs.grammar", self._grammar, f"a valid GBNF grammar (line {line}: {problem})"
        )
