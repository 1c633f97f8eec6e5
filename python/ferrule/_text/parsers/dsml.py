# ruff: noqa: RUF001, RUF002  # the tags are spelled with these characters
"""DeepSeek V4: calls in XML-like notation, whose tags begin with a special token.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Source: the message encoding of deepseek-ai/DeepSeek-V4-Pro, which has no chat template. A value is a string or JSON, as
its tag says.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.draft import Arguments
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State
from ferrule._text.parsers.tagged_calls import Tags, tagged_calls, text_value
from ferrule._text.parsers.tools import JSON_TYPES, STRING, json_of_text

MARK = "｜DSML｜"
TAGS = Tags(
    begin=f"<{MARK}tool_calls>",
    end=f"</{MARK}tool_calls>",
    call=f'<{MARK}invoke name="',
    named='">',
    call_end=f"</{MARK}invoke>",
    argument=f'<{MARK}parameter name="',
    name=re.compile(r'[^"<>\n]+'),
)
PARAMETER_END = f"</{MARK}parameter>"
_STRING, _JSON, _UNKNOWN = '" string="true">', '" string="false">', '">'


def dsml(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_calls(state, TAGS, _parameter)


def _parameter(state: State, function: str, arguments: Arguments) -> Read[None]:
    """Reads a parameter after the quotation mark before its name."""
    text = state.text
    key = yield from text.run(TAGS.name)
    form = yield from text.accept(_STRING, _JSON, _UNKNOWN)
    if form == _STRING:
        arguments.add(key, '"')
        if (yield from text.until(PARAMETER_END, into=state.draft.string_in_arguments)):
            state.draft.arguments('"')
    elif form == _JSON:
        pieces: list[str] = []
        if (yield from text.until(PARAMETER_END, into=pieces.append)):
            arguments.add(key, json_of_text("".join(pieces), JSON_TYPES - STRING))
        else:
            arguments.cut(key, "".join(pieces))
    else:
        yield from text_value(state, function, key, arguments, PARAMETER_END)
