"""Tools for chat templates that do not support them.

A template without tool support would drop the tools silently. Instead, the system message describes them in the format
of Hermes and Qwen, on which more models are trained than on any other, and which the parser `hermes` reads:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Calls in the conversation become part of the content. Results of tools become user messages with `<tool_response>` tags,
as in Qwen's template. If the template has no system role, the description precedes the first user message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from jinja2 import TemplateSyntaxError, nodes

from ferrule._text.chat.images import IMAGE_PART
from ferrule._text.chat.render import MAX_SOURCE, probe
from ferrule._text.chat.sandbox import environment
from ferrule._text.chat.tools import Tool, tool_schemas
from ferrule._text.chat.values import Plain

_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_SYSTEM_ROLES = ("system", "developer")
_PROBE = "A system probe."


@lru_cache(maxsize=64)
def reads_tools(template: str) -> bool:
    """Whether a template reads the variable `tools`; True for an invalid template, which fails in rendering."""
    if len(template) > MAX_SOURCE:
        return True
    try:
        tree = environment().parse(template)
        return any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name))
    except (TemplateSyntaxError, RecursionError):
        return True


def describe_tools(
    template: str, messages: Sequence[dict[str, Any]], tools: Sequence[Tool], special_tokens: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Adds a description of the tools to adapted messages, for a template that does not read tools.

    Raises ChatTemplateError for tools that are not dicts or functions.
    """
    schemas = Plain().dicts(tool_schemas(tools), "tools", "dicts or functions")
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    description = _DESCRIPTION.format(lines)
    described = _with_responses([_with_calls(message) for message in messages])
    if described and described[0]["role"] in _SYSTEM_ROLES:
        described[0] = {**described[0], "content": _joined(described[0].get("content"), "\n\n", description)}
    elif _reads_system(template, tuple(special_tokens.items())):
        described.insert(0, {"role": "system", "content": description})
    else:
        first = next((index for index, message in enumerate(described) if message["role"] == "user"), None)
        if first is None:
            described.insert(0, {"role": "user", "content": description})
        else:
            content = _joined(description, "\n\n", described[first].get("content"))
            described[first] = {**described[first], "content": content}
    return described


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its tool calls written into the content."""
    if not message.get("tool_calls"):
        return message
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call["function"].get("name"), ensure_ascii=False)}, '
        f'"arguments": {_arguments(call["function"].get("arguments"))}}}\n</tool_call>'
        for call in message["tool_calls"]
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    content: object = message.get("content")
    return {**rest, "content": _joined(content, "\n" if _text(content) else "", "\n".join(calls))}


def _with_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with the tool results of each turn in one user message."""
    found: list[dict[str, Any]] = []
    in_responses = False
    for message in messages:
        if message["role"] != "tool":
            found.append(message)
            in_responses = False
            continue
        response = _joined("<tool_response>\n", message.get("content"), "\n</tool_response>")
        if in_responses:
            found[-1] = {"role": "user", "content": _joined(found[-1]["content"], "\n", response)}
        else:
            found.append({"role": "user", "content": response})
        in_responses = True
    return found


def _arguments(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _joined(*contents: object) -> str | list[dict[str, str]]:
    """Concatenates adapted contents to text, or to a list of parts if one has an image."""
    if not any(part["type"] == IMAGE_PART for content in contents for part in _parts(content)):
        return "".join(map(_text, contents))
    return [part for content in contents for part in _parts(content)]


def _parts(content: object) -> list[dict[str, str]]:
    if isinstance(content, list):
        return cast("list[dict[str, str]]", content)
    return [{"type": "text", "text": content}] if isinstance(content, str) and content else []


def _text(content: object) -> str:
    """Returns the text of adapted content."""
    return "\n".join(part["text"] for part in _parts(content) if part["type"] != IMAGE_PART)


@lru_cache(maxsize=64)
def _reads_system(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
    return _PROBE in probe(template, special_tokens, messages)
