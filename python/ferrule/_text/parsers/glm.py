"""GLM 4.5 and later (Z.ai), Ling 3 (inclusionAI) and Hunyuan 3 (Tencent): keys and values of arguments in tags.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Source: the chat templates of zai-org/GLM-4.6, inclusionAI/Ling-3.0-flash and tencent/Hy3-preview. A value has its
declared type, or else is a string; strings are streamed.

Hunyuan 3 has tags of several calls around this, a tag after the name, and `:opensource` at the end of each tag. Its
reasoning is in a tag too.
"""

from __future__ import annotations

import re
from functools import partial

from ferrule._text.parsers.draft import Arguments
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought
from ferrule._text.parsers.tagged_calls import Tags, tagged_calls, text_value

MARK = "<arg_key>"
HUNYUAN_MARK = "'<arg_key{}>'"
"""Tag in Hunyuan's template, which adds the end of all tags to it."""
SUFFIX = ":opensource"
_NAME = re.compile(r"[\w.:/-]+")
_KEY = re.compile(r"[^<>\n]+")
_ARGUMENT = ("arg_key", "/arg_key", "arg_value", "/arg_value")
TAGS = Tags("", "", "<tool_call>", "", "</tool_call>", MARK, _NAME)
KEEP = frozenset({TAGS.call, TAGS.call_end, *(f"<{tag}>" for tag in _ARGUMENT)})
HUNYUAN_TAGS = Tags(
    begin=f"<tool_calls{SUFFIX}>",
    end=f"</tool_calls{SUFFIX}>",
    call=f"<tool_call{SUFFIX}>",
    named=f"<tool_sep{SUFFIX}>",
    call_end=f"</tool_call{SUFFIX}>",
    argument=f"<arg_key{SUFFIX}>",
    name=_NAME,
)
_OUTER = (HUNYUAN_TAGS.begin, HUNYUAN_TAGS.end, HUNYUAN_TAGS.call, HUNYUAN_TAGS.named, HUNYUAN_TAGS.call_end)
HUNYUAN_KEEP = frozenset({*_OUTER, *(f"<{tag}{SUFFIX}>" for tag in _ARGUMENT)})
HUNYUAN_THOUGHT = Thought(f"<think{SUFFIX}>", f"</think{SUFFIX}>", anywhere=False)


def glm(state: State) -> Read[None]:
    """Reads content and calls in GLM's notation."""
    yield from tagged_calls(state, TAGS, partial(_argument, suffix=""))


def hunyuan(state: State) -> Read[None]:
    """Reads content and calls in Hunyuan's notation."""
    yield from tagged_calls(state, HUNYUAN_TAGS, partial(_argument, suffix=SUFFIX))


def _argument(state: State, function: str, arguments: Arguments, *, suffix: str) -> Read[None]:
    """Reads the rest of an argument's key, and its value."""
    text = state.text
    key = yield from text.run(_KEY)
    yield from text.accept(f"</arg_key{suffix}>")
    yield from text.skip_space()
    yield from text.accept(f"<arg_value{suffix}>")
    yield from text_value(state, function, key, arguments, f"</arg_value{suffix}>")
