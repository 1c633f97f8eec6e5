"""Renders conversations byte for byte like transformers' `apply_chat_template` (5.23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import jinja2

from ferrule._text.chat.budget import BUDGET, Budget
from ferrule._text.chat.sandbox import environment
from ferrule._text.chat.tools import Tool, tool_schemas
from ferrule._text.chat.values import Plain
from ferrule._validation import shown
from ferrule.errors import ChatTemplateError

Message: TypeAlias = Mapping[str, Any]
"""Message with `role`, `content`, and other fields that the template reads."""

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
MAX_SOURCE = 1 << 16
"""Maximum number of characters of a template, three times that of the longest in use."""
MAX_WORDS = 2000
"""Maximum number of characters of a template's error message."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the message field with the reasoning text; templates read the first or the second."""
END_MARK = "END_OF_THE_FINAL_MESSAGE_THAT_CONTINUES "
"""Mark that is appended to the final message to find its end in the rendered text; templates may strip its space."""


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    tools: Sequence[Tool] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation; `arguments` are further variables of the template.

    With `continue_final_message` the text ends with the content of the last message, or with the named field.

    Raises ChatTemplateError, with the template's message if it raises an exception.
    """
    plain = Plain()
    conversation = [_with_reasoning(message) for message in plain.dicts(messages, "messages", "messages")]
    if not conversation:
        raise ChatTemplateError("messages must have at least one message, got an empty list")
    variables: dict[str, Any] = {
        **special_tokens,
        **_checked_arguments(arguments, plain),
        "messages": conversation,
        "tools": None if tools is None else plain.dicts(tool_schemas(tools), "tools", "dicts or functions"),
        "documents": None if documents is None else plain.dicts(documents, "documents"),
        "add_generation_prompt": _checked_flag("add_generation_prompt", add_generation_prompt),
    }
    field = "content" if continue_final_message is True else continue_final_message
    if not isinstance(field, str):
        _checked_flag("continue_final_message", field)
        return _rendered(template, variables, plain.characters)
    if add_generation_prompt:
        raise ChatTemplateError("add_generation_prompt must be False with continue_final_message, got True")
    final = _mark_end(template, conversation[-1], field)
    return _cut(_rendered(template, variables, plain.characters), final, field)


def probe(template: str, special_tokens: tuple[tuple[str, str], ...], messages: Sequence[Message]) -> str:
    """Renders a small conversation to test a template; returns an empty text if the template refuses it."""
    try:
        return render_chat(template, messages, special_tokens=dict(special_tokens))
    except ChatTemplateError:
        return ""


def _checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ChatTemplateError(f"{name} must be True or False, got {shown(value)}")
    return value


def _checked_arguments(arguments: object, plain: Plain) -> dict[str, Any]:
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ChatTemplateError(f"chat_template_kwargs must be a dict, got {shown(arguments)}")
    for name in cast("Mapping[object, object]", arguments):
        if not isinstance(name, str):
            raise ChatTemplateError(f"names in chat_template_kwargs must be strings, got {shown(name)}")
        if name in RESERVED:
            raise ChatTemplateError(f"chat_template_kwargs must not have {name}, which is a separate argument")
    return plain.copy(cast("object", arguments), "chat_template_kwargs")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without null fields, with its reasoning text under both names that templates read."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in REASONING if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _mark_end(template: str, message: dict[str, Any], field: str) -> str:
    """Appends the mark to a field of a message, and returns the original text of the field."""
    value: object = message.get(field)
    if value is None:
        raise ChatTemplateError(f"continue_final_message: the final message has no {field}")
    names = [name for name in REASONING if message.get(name) == value] if field in REASONING else [field]
    if not any(name in template for name in names):
        raise ChatTemplateError(f"continue_final_message: the chat template does not read the field {field}")
    holder = message
    if isinstance(value, (list, tuple)):
        parts = [
            cast("dict[str, Any]", part)
            for part in cast("Sequence[object]", value)
            if isinstance(part, dict) and "text" in part
        ]
        if not parts:
            raise ChatTemplateError(f"continue_final_message: {field} of the final message has no text part")
        holder, names, value = parts[-1], ["text"], parts[-1]["text"]
    if not isinstance(value, str):
        raise ChatTemplateError(
            f"continue_final_message: {field} of the final message must be a string or a list of parts, "
            f"got {shown(value)}"
        )
    for name in names:
        holder[name] = value + END_MARK
    return value


def _cut(text: str, final: str, field: str) -> str:
    """Returns the rendered text before the mark."""
    mark = END_MARK.strip()
    if final.strip() not in text or mark not in text:
        raise ChatTemplateError(
            f"continue_final_message: the chat template does not render {field} of the final message unchanged"
        )
    end = text.rindex(mark)
    # A template that strips the space after the mark would strip the space before it too.
    return text[:end] if text.startswith(END_MARK, end) else text[:end].rstrip()


def _rendered(template: object, variables: dict[str, Any], characters: int) -> str:
    if not isinstance(template, str):
        raise ChatTemplateError(f"the chat template must be a string, got {shown(template)}")
    if len(template) > MAX_SOURCE:
        raise ChatTemplateError(f"the chat template has {len(template)} characters; the maximum is {MAX_SOURCE}")
    try:
        compiled = _compiled(template)
        token = BUDGET.set(Budget(characters))
        try:
            return compiled.render(variables)
        finally:
            BUDGET.reset(token)
    except ChatTemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"chat template: {str(error.message)[:MAX_WORDS]}") from error
    except RecursionError as error:
        raise ChatTemplateError("chat template: blocks, expressions or macros are nested too deeply") from error
    except Exception as error:  # an error in an expression of the template, such as a missing key or a wrong type
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {str(error)[:MAX_WORDS]}") from error


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)
