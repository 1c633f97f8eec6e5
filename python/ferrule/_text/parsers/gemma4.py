"""Gemma 4 and FunctionGemma: calls between special tokens in a custom notation.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>                      Gemma 4
    <start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>       FunctionGemma

Source: "Gemma 4 prompt formatting" and "FunctionGemma formatting and best practices" (ai.google.dev/gemma/docs), and
the chat template of google/gemma-4-31B-it. Strings are between special tokens without escapes; keys have no quotes.
Calls are converted to JSON while they arrive. A call is final from its opening brace; text outside of the notation is
kept unchanged. Reasoning of Gemma 4 is between `<|channel>thought` and `<channel|>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ferrule._text.parsers.draft import quoted
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought
from ferrule._text.parsers.tools import is_json

THOUGHT = Thought("<|channel>thought\n", "<channel|>", anywhere=True)
CALL = "call:"
_NAME = re.compile(r"[\w.-]+")
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Notation:
    """Special tokens of one of the two notations."""

    begin: str
    end: str
    quote: str

    @property
    def keep(self) -> frozenset[str]:
        """All tokens of the notation."""
        return frozenset({self.begin, self.end, self.quote})


GEMMA4 = Notation("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTIONGEMMA = Notation("<start_function_call>", "<end_function_call>", "<escape>")


def gemma4(state: State) -> Read[None]:
    """Reads content and calls in Gemma 4's notation."""
    yield from _message(state, GEMMA4)


def functiongemma(state: State) -> Read[None]:
    """Reads content and calls in FunctionGemma's notation."""
    yield from _message(state, FUNCTIONGEMMA)


def _message(state: State, notation: Notation) -> Read[None]:
    text = state.text
    inside = False
    while marker := (yield from state.content(notation.begin, *((notation.end,) if inside else ()))):
        if marker == notation.end:
            inside = False
            continue
        text.hold(marker)
        yield from text.skip_space()
        name = (yield from text.run(_NAME)) if (yield from text.accept(CALL)) else ""
        if not name or not (yield from text.accept("{")):
            state.as_content()
            continue
        text.held()
        inside = True
        state.draft.call(name)
        state.draft.arguments("{")
        if not (yield from _members(state, notation)):
            yield from text.upto(notation.end, into=state.draft.arguments)


def _members(state: State, notation: Notation) -> Read[bool]:
    """Reads the rest of the arguments; returns False if they end early or do not follow the notation."""
    text, write = state.text, state.draft.arguments
    open_ones = ["{"]
    while True:
        yield from text.skip_space()
        following = yield from text.peek()
        if following in ("}", "]"):
            if following != _CLOSERS[open_ones.pop()]:
                return False
            yield from text.accept(following)
            write(following)
            if not open_ones:
                return True
            continue
        if following == ",":
            yield from text.accept(",")
            write(", ")
            continue
        if open_ones[-1] == "{" and not (yield from _key(state, notation)):
            return False
        yield from text.skip_space()
        opener = yield from text.accept("{", "[", notation.quote)
        if opener == notation.quote:
            write('"')
            if not (yield from text.until(notation.quote, into=state.draft.string_in_arguments)):
                return False
            write('"')
        elif opener:
            write(opener)
            open_ones.append(opener)
        elif not (yield from _bare(state, notation)):
            return False


def _key(state: State, notation: Notation) -> Read[bool]:
    """Reads a key and its colon; nested keys may have quotes."""
    text = state.text
    pieces: list[str] = []
    if (yield from text.accept(notation.quote)):
        yield from text.until(notation.quote, into=pieces.append)
        yield from text.skip_space()
    else:
        yield from text.upto(":", ",", *_CLOSERS, *_CLOSERS.values(), notation.quote, notation.end, into=pieces.append)
    key = "".join(pieces).strip()
    if not (yield from text.accept(":")):
        state.draft.arguments(key)
        return False
    state.draft.arguments(quoted(key) + ": ")
    return True


def _bare(state: State, notation: Notation) -> Read[bool]:
    """Reads a value without quotes: a JSON number or word, or else a string; returns False if it is incomplete."""
    pieces: list[str] = []
    end = yield from state.text.upto(",", "}", "]", notation.end, into=pieces.append)
    value = "".join(pieces).strip()
    whole = end in (",", "}", "]") and bool(value)
    state.draft.arguments(value if not whole or is_json(value) else quoted(value))
    return whole
