"""Chat templates, rendered as transformers renders them: the same sandbox, extensions, filters and functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from ferrule.errors import ChatTemplateError

if TYPE_CHECKING:
    from jinja2.parser import Parser

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content`, and whatever else the template reads."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation. `arguments` are further variables of the template.

    Raises ChatTemplateError, with the template's own words where it raises an exception.
    """
    if not messages:
        raise ChatTemplateError("the conversation is empty; it must have at least one message")
    for name in arguments or {}:
        if name in RESERVED:
            raise ChatTemplateError(f"{name} is an argument of its own; it cannot be given to the template otherwise")
    variables = {
        **special_tokens,
        **(arguments or {}),
        "messages": messages,
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compiled(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"chat template: {error.message}") from error
    except (RecursionError, MemoryError, OverflowError) as error:
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from error
    except Exception as error:  # whatever an expression in it ran into: a missing key, a wrong type
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions = cast("dict[str, object]", environment.globals)
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100  # templates pass it by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100
) -> str:
    # jinja2's own escapes HTML, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
