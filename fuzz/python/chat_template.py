"""Chat templates: any template renders, or is refused with a typed error; deriving its parsers raises no error."""

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["ferrule._text", "jinja2"]):
    from ferrule._text.chat import render_chat
    from ferrule._text.derivation import derive_format
    from ferrule.errors import ChatTemplateError

CALL = {"type": "function", "id": "0", "function": {"name": "f", "arguments": {"x": [1, None]}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "0", "content": "é"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def render(data: bytes) -> None:
    """Renders a conversation that has every kind of message."""
    template = data.decode(errors="replace")
    with contextlib.suppress(ChatTemplateError):
        render_chat(template, MESSAGES, special_tokens={"bos_token": "<s>"}, tools=TOOLS)
    derive_format(template, {"bos_token": "<s>"})


atheris.Setup(sys.argv, render)
atheris.Fuzz()
