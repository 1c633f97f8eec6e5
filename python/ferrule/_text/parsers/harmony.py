"""gpt-oss: the harmony format, in which the whole output is messages on channels.

    <|channel|>analysis<|message|>They ask for the weather.<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

Source: github.com/openai/harmony, docs/format.md. A message with a recipient is a call, on any channel, wherever the
header names the recipient. Another message on `analysis` is reasoning, and all other messages are content, including
preambles on `commentary`. The markers are special tokens, so they are recognized within strings too. An incomplete
header is content, markers included.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.reader import Read, Sink
from ferrule._text.parsers.state import State, Thought

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
KEEP = frozenset({START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS})
THOUGHT = Thought("<|channel|>analysis<|message|>", "<|end|>", anywhere=True)
FUNCTIONS = "functions."
PEOPLE = ("assistant", "user")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


def harmony(state: State) -> Read[None]:
    """Reads messages, starting in the first header or in the reasoning that the prompt began."""
    text, draft = state.text, state.draft
    into = draft.content
    if state.reasoning_open:
        draft.begin_reasoning()
        into = draft.reasoning
    else:
        text.hold()
        yield from text.skip_space()
        if (yield from text.accept("to=")):
            into = yield from _header(state)
        else:
            draft.content(text.held())
    while marker := (yield from text.until(START, CHANNEL, *ENDS, into=into)):
        draft.mark()
        if marker in ENDS:
            into = draft.content
        else:
            text.hold(marker)
            into = yield from _header(state)


def _header(state: State) -> Read[Sink]:
    """Reads the rest of a held header; returns the sink for the message's text."""
    text, draft = state.text, state.draft
    if (yield from text.upto(MESSAGE, START, *ENDS)) != MESSAGE:
        state.as_content()
        return draft.content
    header = text.held()
    yield from text.accept(MESSAGE)
    recipients = _RECIPIENT.findall(header)
    name = recipients[-1].removeprefix(FUNCTIONS) if recipients else ""
    channels = _CHANNEL.findall(header)
    if name and name not in PEOPLE:
        draft.call(name)
        yield from text.skip_space()
        return draft.arguments
    if channels and channels[-1] == "analysis":
        draft.begin_reasoning()
        return draft.reasoning
    draft.begin_content()
    return draft.content
