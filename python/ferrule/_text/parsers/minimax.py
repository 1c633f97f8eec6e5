"""MiniMax M1, M2 and M3: calls as JSON, in XML-like notation, and in that with a special token before each tag.

    <tool_calls>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_calls>                                                                                           Text-01, M1

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>                                                                                             M2

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>                                                                                        M3

Source: the chat templates of MiniMaxAI/MiniMax-M1-80k, MiniMax-M2 and MiniMax-M3. In M3, a tag inside a call is the
name of an argument or of a key of an object, or `item` for an element of a list. A value has its declared type, or else
is a string. M3's reasoning is between `<mm:think>` and `</mm:think>`; an answer without it begins with the end marker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ferrule._text.parsers.draft import Arguments, quoted
from ferrule._text.parsers.json_calls import tagged_objects
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought
from ferrule._text.parsers.tagged_calls import Tags, tagged_calls, text_value
from ferrule._text.parsers.tools import json_of_text, member_schema, types_of

TAG = "]<]minimax[>["
TAGS = Tags(
    begin=TAG + "<tool_call>",
    end=TAG + "</tool_call>",
    call=TAG + '<invoke name="',
    named='">',
    call_end=TAG + "</invoke>",
    argument=TAG + "<",
    name=re.compile(r'[^"<>\n]+'),
)
M2_TAGS = Tags(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call='<invoke name="',
    named='">',
    call_end="</invoke>",
    argument='<parameter name="',
    name=re.compile(r'[^"<>\n]+'),
)
M1_BEGIN, M1_END = "<tool_calls>", "</tool_calls>"
ITEM = "item"
THOUGHT = Thought("<mm:think>", "</mm:think>", anywhere=False, dropped=("</mm:think>",))
MAX_DEPTH = 64
"""Maximum number of levels of nested tags in an argument; a deeper value is a string."""

_NAME = re.compile(r'[^"<>\n]+')
_KEY = re.compile(r"[^<>\n]+")
_TAG_IN_VALUE = re.compile(re.escape(TAG) + r"<(/?)([^<>\n]+)>")


def minimax_m1(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_objects(state, M1_BEGIN, M1_END)


def minimax_m2(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_calls(state, M2_TAGS, _parameter)


def minimax_m3(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_calls(state, TAGS, _argument)


def _parameter(state: State, function: str, arguments: Arguments) -> Read[None]:
    """Reads a parameter of M2 after the quotation mark before its name."""
    key = yield from state.text.run(_NAME)
    yield from state.text.accept('">')
    yield from text_value(state, function, key, arguments, "</parameter>")


def _argument(state: State, function: str, arguments: Arguments) -> Read[None]:
    """Reads an argument after the `<` of its tag."""
    text = state.text
    key = yield from text.run(_KEY)
    yield from text.accept(">")
    begin, end = f"{TAG}<{key}>", f"{TAG}</{key}>"
    depth = 1
    pieces: list[str] = []
    while depth:
        marker = yield from text.until(begin, end, into=pieces.append)
        if not marker:
            arguments.cut(key, "".join(pieces))
            return
        depth += 1 if marker == begin else -1
        if depth:
            pieces.append(marker)
    arguments.add(key, _value("".join(pieces), state.tools.schema(function, key)))


@dataclass
class _Element:
    """An open tag."""

    name: str
    schema: Mapping[str, Any]
    texts: list[str]
    """Texts between the tags in the element."""
    members: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Names and JSON values of the tags in the element."""

    def json(self) -> str:
        """Returns the value as JSON.

        Raises ValueError for text beside tags.
        """
        text = "".join(self.texts)
        if not self.members:
            return json_of_text(text, types_of(self.schema))
        if text.strip():
            raise ValueError(text)
        if all(name == ITEM for name, _ in self.members) and "object" not in types_of(self.schema):
            return f"[{', '.join(value for _, value in self.members)}]"
        return f"{{{', '.join(f'{quoted(name)}: {value}' for name, value in self.members)}}}"


def _value(text: str, schema: Mapping[str, Any]) -> str:
    """Returns the content of a tag as JSON; a string if its tags are not well-formed."""
    parts = _TAG_IN_VALUE.split(text)
    stack = [_Element("", schema, [parts[0]])]
    try:
        for slash, name, following in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            if slash:
                closed = stack.pop()
                if closed.name != name or not stack:
                    return quoted(text)
                stack[-1].members.append((name, closed.json()))
                stack[-1].texts.append(following)
            elif len(stack) == MAX_DEPTH:
                return quoted(text)
            else:
                stack.append(_Element(name, member_schema(stack[-1].schema, name), [following]))
        return stack[0].json() if len(stack) == 1 else quoted(text)
    except ValueError:
        return quoted(text)
