"""Qwen3-Coder and later models, and Seed-OSS: calls in XML-like notation.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct. A value is the text between its tags without one line
end on either side. It has its declared type, or else is a string; strings are streamed.

Seed-OSS (ByteDance-Seed/Seed-OSS-36B-Instruct) has the outer tag `<seed:tool_call>` and writes no line ends around
values, so a value is the whole text. Its reasoning is between `<seed:think>` and `</seed:think>`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from ferrule._text.parsers.draft import Arguments
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought
from ferrule._text.parsers.tagged_calls import Tags, tagged_calls, text_value

PARAMETER_END = "</parameter>"
SEED_THOUGHT = Thought("<seed:think>", "</seed:think>", anywhere=False)
QWEN_TAGS = Tags(
    begin="<tool_call>",
    end="</tool_call>",
    call="<function=",
    named=">",
    call_end="</function>",
    argument="<parameter=",
    name=re.compile(r"[^<>\s]+"),
)
SEED_TAGS = replace(QWEN_TAGS, begin="<seed:tool_call>", end="</seed:tool_call>")
_KEY = re.compile(r"[^<>\n]+")


def qwen3_coder(state: State) -> Read[None]:
    """Reads content and calls in Qwen's notation."""
    yield from tagged_calls(state, QWEN_TAGS, partial(_parameter, line_ends=True))


def seed_oss(state: State) -> Read[None]:
    """Reads content and calls in Seed-OSS's notation."""
    yield from tagged_calls(state, SEED_TAGS, partial(_parameter, line_ends=False))


def _parameter(state: State, function: str, arguments: Arguments, *, line_ends: bool) -> Read[None]:
    """Reads a parameter after its `=`; with `line_ends`, line ends around the value are not part of it."""
    text = state.text
    key = yield from text.run(_KEY)
    yield from text.accept(">")
    ends = (PARAMETER_END,)
    if line_ends:
        yield from text.accept("\n")
        ends = ("\n" + PARAMETER_END, PARAMETER_END)
    yield from text_value(state, function, key, arguments, *ends)
