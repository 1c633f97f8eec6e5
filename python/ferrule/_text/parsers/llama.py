"""Llama 3.1 to 4, and models trained on the same formats: calls in JSON or in Python notation.

    {"name": "get_weather", "parameters": {"city": "Paris"}}        several in a list, or separated by semicolons
    [get_weather(city="Paris"), get_time(zone="CET")]

Source: "JSON based tool calling" and "Zero shot function calling" in the prompt formats of Llama 3.1 to 4
(github.com/meta-llama/llama-models). No marker announces a call. So calls are recognized only at the beginning of the
answer, after `<|python_tag|>`, or after Llama 4's `<|python_start|>`, and only if they are unambiguous: a list whose
first element is a Python call, or objects that `call_object` accepts. If tools are declared, the first call must name
one of them. Code after a tag is content.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrule._text.parsers import python_calls
from ferrule._text.parsers.json_calls import call_list, call_object
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

JSON_FORM = '"parameters": dictionary of argument name and its value'
"""Description of the JSON notation in Meta's templates; it identifies Llama 3.2's template, which has no tags."""
TAGS, TAG_END = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"


def llama_json(state: State) -> Read[None]:
    """Reads the calls that an answer begins with, then content and calls after tags."""
    yield from _answer(state, json_calls)


def llama_pythonic(state: State) -> Read[None]:
    """Reads Python calls that an answer begins with, then content and calls after tags."""
    yield from _answer(state, pythonic_calls)


def json_calls(state: State) -> Read[bool]:
    """Reads a list of calls, or calls separated by semicolons; returns False if there are none, and holds the text."""
    text = state.text
    if (yield from text.accept("[")):
        return (yield from call_list(state, certain=False))
    written = False
    while (yield from text.peek()) == "{" and (yield from call_object(state, certain=False)):
        written = True
        text.hold()
        yield from text.skip_space()
        if (yield from text.accept(";")):
            yield from text.skip_space()
    if written:
        state.as_content()
    return written


def pythonic_calls(state: State) -> Read[bool]:
    """Reads a list of Python calls; returns False if there are none, and holds the text."""
    return bool((yield from state.text.accept("["))) and (yield from python_calls.call_list(state))


def _answer(state: State, calls: Callable[[State], Read[bool]]) -> Read[None]:
    text = state.text
    tag = ""
    while True:
        text.hold(tag)
        yield from text.skip_space()
        if not tag and (yield from text.accept(*TAGS)):
            yield from text.skip_space()
        if (yield from calls(state)):
            text.hold()
            yield from text.skip_space()
            if (yield from text.accept(TAG_END)):
                text.held()
        state.as_content()
        tag = yield from state.content(*TAGS)
        if not tag:
            return
