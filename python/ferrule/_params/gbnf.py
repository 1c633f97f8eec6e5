"""Translation of GBNF, llama.cpp's grammar notation, to Lark, which llguidance compiles.

Every rule of a GBNF grammar becomes a Lark rule. A character class becomes a regular expression of one character, so
that terminals do not match more than in GBNF. Source: `grammars/README.md` of llama.cpp. Tokens (`<think>`, `<[1000]>`)
are unsupported.
"""

from __future__ import annotations

import json
import re

from ferrule.errors import InvalidParameterError

MAX_DEPTH = 100
"""Maximum nesting depth of parentheses."""

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<name>[A-Za-z0-9_-]+)
    |(?P<define>::=)
    |(?P<literal>"(?:\\.|[^"\\\n])*")
    |(?P<chars>\[(?:\\.|[^\]\\\n])*\])
    |(?P<repeat>[*+?]|\{[^{}\n]*\})
    |(?P<any>\.)
    |(?P<open>\()|(?P<close>\))|(?P<or>\|)
    |(?P<newline>\n)
    |(?P<space>[ \t\r]+|\#[^\n]*)""",
    re.VERBOSE,
)
_REPETITION = re.compile(r"\{ *(\d{1,9}) *(?:(,) *(\d{0,9}) *)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in '\\"[]-'}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_EXPECTED = {"name": "a rule name", "define": "'::='", "close": "')'", "newline": "the end of the rule"}
_CHARACTER_ERRORS = {
    '"': "literal without a closing quotation mark",
    "[": "character class without a closing bracket",
    "{": "repetition without a closing brace",
    "<": "tokens such as <think> and <[1000]> are unsupported; use literals",
    "!": "tokens such as !<think> and !<[1000]> are unsupported; use literals",
}
"""Error messages for characters that do not begin a token."""


def is_gbnf(grammar: str) -> bool:
    """Returns whether a grammar is GBNF, which defines rules with `::=`, and not Lark, which uses a colon."""
    return _RULE.search(grammar) is not None


def gbnf_to_lark(grammar: str) -> str:
    """Translates a GBNF grammar to Lark; its rule `root` becomes `start`.

    Raises InvalidParameterError, which names the line and the error.
    """
    return _Translation(grammar).lark()


class _Translation:
    """Recursive descent parser that translates one grammar to Lark."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._tokens = self._read(grammar)
        self._next = 0
        self._names: dict[str, str] = {"root": "start"}
        """Name of each rule in Lark, by its name in GBNF."""
        self._referenced: dict[str, int] = {}
        """Line of the first use of each rule."""

    def lark(self) -> str:
        """Returns the grammar in Lark."""
        rules: dict[str, str] = {}
        while self._skip_newlines():
            name, line = self._expect("name")
            self._expect("define")
            if name in rules:
                raise self._error(line, f"rule {name!r} is defined twice")
            self._skip_newlines()
            rules[name] = f"{self._rule_name(name)}: {self._alternatives(0)}"
            if self._peek() is not None:
                self._expect("newline")
        if "root" not in rules:
            raise self._error(1, "rule 'root' is missing")
        for name, line in self._referenced.items():
            if name not in rules:
                raise self._error(line, f"rule {name!r} is not defined")
        return "\n".join(rules.values()) + "\n"

    def _read(self, grammar: str) -> list[tuple[str, str, int]]:
        tokens: list[tuple[str, str, int]] = []
        position, line = 0, 1
        while position < len(grammar):
            found = _TOKEN.match(grammar, position)
            if found is None or found.lastgroup is None:
                character = grammar[position]
                raise self._error(line, _CHARACTER_ERRORS.get(character, f"unexpected {character!r}"))
            if found.lastgroup != "space":
                tokens.append((found.lastgroup, found.group(), line))
            line += found.lastgroup == "newline"
            position = found.end()
        return tokens

    def _peek(self) -> str | None:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else None

    def _expect(self, kind: str) -> tuple[str, int]:
        if self._peek() is None:
            raise self._error(self._tokens[-1][2], f"unexpected end of the grammar, expected {_EXPECTED[kind]}")
        found, text, line = self._tokens[self._next]
        if found != kind:
            shown = "the end of the line" if found == "newline" else repr(text)
            raise self._error(line, f"unexpected {shown}, expected {_EXPECTED[kind]}")
        self._next += 1
        return text, line

    def _skip_newlines(self) -> bool:
        """Skips line ends; returns whether any text follows."""
        while self._peek() == "newline":
            self._next += 1
        return self._peek() is not None

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(self._tokens[self._next - 1][2], f"parentheses have more than {MAX_DEPTH} levels")
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
                _, text, line = self._tokens[self._next]
                part = self._repeated(part, text, line)
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

    def _repeated(self, part: str, repetition: str, line: int) -> str:
        if repetition in "*+?":
            return f"({part}){repetition}"
        found = _REPETITION.fullmatch(repetition)
        if found is None:
            raise self._error(line, f"repetition {repetition} must have the form {{m}}, {{m,}} or {{m,n}}")
        minimum, comma, maximum = found.groups()
        if maximum and int(maximum) < int(minimum):
            raise self._error(line, f"repetition {repetition} must have a maximum >= its minimum")
        if int((maximum if comma else minimum) or 1) == 0:
            return '""'  # Lark rejects a maximum of 0
        return f"({part}){{{minimum}{comma or ''}{maximum or ''}}}"

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
                raise self._error(line, f"character range {chr(low)}-{chr(high)} must be in ascending order")
            ranges.append(f"\\x{{{low:X}}}-\\x{{{high:X}}}" if low != high else f"\\x{{{low:X}}}")
            index += 1
        if not ranges:
            raise self._error(line, "character class [] must have at least one character")
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"

    def _characters(self, text: str, line: int) -> list[int]:
        return [code for code, _ in self._units(text, line)]

    def _units(self, text: str, line: int) -> list[tuple[int, bool]]:
        """Returns the code points of a literal or a character class, and whether each was escaped."""
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
            if escape in _ESCAPES:
                units.append((ord(_ESCAPES[escape]), True))
                continue
            digits = _HEX_DIGITS.get(escape)
            if digits is None:
                supported = " ".join(f"\\{each}" for each in (*_ESCAPES, *_HEX_DIGITS))
                raise self._error(line, f"unsupported escape \\{escape}; choose one of: {supported}")
            code = text[position : position + digits]
            if len(code) != digits or not re.fullmatch("[0-9A-Fa-f]+", code):
                raise self._error(line, f"escape \\{escape}{code} must have {digits} hexadecimal digits")
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) <= 0xDFFF:
                raise self._error(line, f"escape \\{escape}{code} must be a Unicode character, at most U+10FFFF")
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
