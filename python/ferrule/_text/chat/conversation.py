"""Converts conversations in OpenAI's form to the form that a model's template reads.

Templates differ in two respects, which are detected by rendering a small conversation once:

- Content. A template that renders both parts of a user message gets lists of parts in user messages, and text joined by
  line breaks in other messages. A template that reads only lists gets lists in all messages. Other templates get text.
  Messages with images are lists; `take_images` has replaced their images before.
- Arguments of tool calls. OpenAI's form is JSON text, but most templates expect dicts; templates that fail on dicts get
  JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from ferrule._text.chat.images import IMAGE_PART
from ferrule._text.chat.render import Message, probe
from ferrule._text.chat.values import Plain
from ferrule._validation import shown
from ferrule.errors import ChatTemplateError

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of text parts in OpenAI's two APIs."""

_FIRST, _SECOND, _KEY = "A first probe.", "A second probe.", "probe_key"


@dataclass(frozen=True)
class Reading:
    """Form of the content that a template reads."""

    text: bool
    parts: bool
    """Whether the template reads user messages as lists of parts."""


def adapt_messages(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns the conversation in the form that the template reads.

    Raises ChatTemplateError, which names the message and the field.
    """
    adapted = Plain().dicts(messages, "messages", "messages")
    tokens = tuple(special_tokens.items())
    for index, message in enumerate(adapted):
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"{where}.role must be a string, got {shown(message.get('role'))}")
        if "content" in message:
            content = _checked_content(message["content"], f"{where}.content")
            reading = _reading(template, tokens)
            if not reading.parts and isinstance(content, list) and _has_image(content):
                raise ChatTemplateError(f"{where}.content must not have images: the chat template reads text only")
            message["content"] = _adapt_content(content, message["role"], reading)
        if message.get("tool_calls") is not None:
            _adapt_calls(message, where, template, tokens)
    return adapted


def _checked_content(content: object, where: str) -> str | list[dict[str, str]] | None:
    """Returns the text, or a list of parts that have no other fields than a template reads."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatTemplateError(f"{where} must be a string or a list of content parts, got {shown(content)}")
    parts: list[dict[str, str]] = []
    for index, part in enumerate(cast("list[object]", content)):
        held = cast("dict[str, object]", part) if isinstance(part, dict) else {"type": "text", "text": part}
        kind, text = held.get("type"), held.get("text")
        if kind == IMAGE_PART:
            parts.append({"type": IMAGE_PART})
            continue
        if kind not in TEXT_PARTS:
            allowed = ", ".join(TEXT_PARTS)
            raise ChatTemplateError(f"{where}[{index}].type must be one of {allowed}, got {shown(kind)}")
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where}[{index}].text must be a string, got {shown(text)}")
        parts.append({"type": "text", "text": text})
    return parts


def _has_image(parts: Sequence[dict[str, str]]) -> bool:
    return any(part["type"] == IMAGE_PART for part in parts)


def _adapt_content(content: str | list[dict[str, str]] | None, role: str, reading: Reading) -> object:
    only_parts = reading.parts and not reading.text
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if only_parts else content
    if content is None or only_parts or (reading.parts and role == "user") or _has_image(content):
        return content
    return "\n".join(part["text"] for part in content)


def _adapt_calls(message: dict[str, Any], where: str, template: str, tokens: tuple[tuple[str, str], ...]) -> None:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where}.tool_calls must be a list of dicts, got {shown(calls)}")
    if not calls:
        # Templates test whether the list exists, and would render an empty call.
        del message["tool_calls"]
        return
    for index, call in enumerate(cast("list[object]", calls)):
        function: object = cast("dict[str, object]", call).get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            found = shown(cast("object", call))
            raise ChatTemplateError(f"{where}.tool_calls[{index}] must be a dict with a function, got {found}")
        held = cast("dict[str, Any]", function)
        held["arguments"] = _adapt_arguments(held.get("arguments"), as_dict=_reads_dicts(template, tokens))


def _adapt_arguments(arguments: object, *, as_dict: bool) -> object:
    """Returns arguments as a dict or as JSON. Invalid JSON is returned unchanged, since a model may have written it."""
    if isinstance(arguments, dict):
        held = cast("dict[str, object]", arguments)
        return held if as_dict else json.dumps(held, ensure_ascii=False)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {} if as_dict else "{}"
    if not as_dict or not isinstance(arguments, str):
        return arguments
    try:
        parsed: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else arguments


@lru_cache(maxsize=64)
def _reading(template: str, special_tokens: tuple[tuple[str, str], ...]) -> Reading:
    def shows(content: object) -> bool:
        text = probe(template, special_tokens, [{"role": "user", "content": content}])
        # A template without support for parts may print the list with the keys of its dicts.
        return _FIRST in text and _SECOND in text and _KEY not in text

    parts = [{"type": "text", "text": each, _KEY: True} for each in (_FIRST, _SECOND)]
    return Reading(text=shows(f"{_FIRST} {_SECOND}"), parts=shows(parts))


@lru_cache(maxsize=64)
def _reads_dicts(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    def shows(arguments: object) -> bool:
        call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "name": "probe", "content": "!"},
        ]
        text = probe(template, special_tokens, messages)
        # A template without support for dicts prints Python's notation, which models are not trained on.
        return _KEY in text and f"'{_KEY}'" not in text

    return shows({_KEY: 1}) or not shows(json.dumps({_KEY: 1}))
