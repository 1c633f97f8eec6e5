"""Apriel and Jamba: a JSON list of calls in a tag.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>

Source: the chat templates of ServiceNow-AI/Apriel-1.5-15b-Thinker and ai21labs/AI21-Jamba-Mini-1.5. Apriel reasons
until `[BEGIN FINAL RESPONSE]`.
"""

from __future__ import annotations

from ferrule._text.parsers.json_calls import tagged_lists
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought

BEGIN, END = "<tool_calls>", "</tool_calls>"
ANSWER, ANSWER_END = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"
THOUGHT = Thought("Here are my reasoning steps:\n", ANSWER, anywhere=False, dropped=(ANSWER_END,))


def apriel(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_lists(state, BEGIN, END)
