"""Nemotron Nano 2 (NVIDIA): a JSON list of calls in a tag. Nemotron 3 has Qwen3-Coder's notation.

    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>

Source: the chat template of nvidia/NVIDIA-Nemotron-Nano-9B-v2.
"""

from __future__ import annotations

from ferrule._text.parsers.json_calls import tagged_lists
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"


def nemotron(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_lists(state, BEGIN, END)
