"""Cohere's Command models: a JSON list of calls between special tokens.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

Source: the chat templates of CohereLabs/c4ai-command-r7b-12-2024 and command-a-reasoning-08-2025. The template numbers
the calls itself, so the model's ids are replaced by new ids. Reasoning and answer are between special tokens too; the
tokens around the answer contain `RESPONSE` in Command R7B and A, and `TEXT` in later models.
"""

from __future__ import annotations

from ferrule._text.parsers.json_calls import tagged_lists
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
THOUGHT = Thought(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    anywhere=True,
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)


def cohere(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_lists(state, BEGIN, END)
