"""Hermes (Nous Research) and Qwen 2.5 and 3: a JSON object in a tag for each call.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Source: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen3-8B. A tag around several objects holds
several calls; a tag around any other text is content, tag included.
"""

from __future__ import annotations

from ferrule._text.parsers.json_calls import tagged_objects
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_objects(state, BEGIN, END)
