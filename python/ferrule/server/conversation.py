"""Conversations with tools, for all protocols: rendering of the prompt and format of the output.

Tool choice `auto` leaves the choice to the model, which writes calls in its own format. `required` and a named tool
constrain the output of any model to a JSON list of calls; such an output has no reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

from ferrule._engine.workers import WORKERS
from ferrule._params.closed_objects import strict_schema
from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.parsers import MessageFormat
from ferrule._text.prompt import TokensPrompt
from ferrule.errors import InvalidParameterError
from ferrule.server.errors import unsupported
from ferrule.server.models import ServedModel
from ferrule.server.schema.limits import MAX_TOOLS
from ferrule.server.settings import ServerSettings

NONE, AUTO, REQUIRED = "none", "auto", "required"
DEFINITIONS = "#/$defs/"
FORCED_FORM = "llama3_json"
"""Parser of a JSON list of calls."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in OpenAI's form, with tools and arguments of the chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    strict_tools: Set[str] = frozenset()
    """Names of the tools whose arguments have every property and no other, where arguments are constrained."""
    tool_choice: str = AUTO
    """`none`, `auto`, `required`, or `function:` with the name of a tool."""
    parallel_tool_calls: bool = True
    structure: StructuredOutputsParams | None = None
    """Structure that the request asks for, other than tool calls."""
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False


@dataclass(frozen=True)
class PreparedPrompt:
    """Rendered prompt with the format and the structure of the output."""

    prompt: TokensPrompt
    message_format: MessageFormat | None
    structure: StructuredOutputsParams | None
    only_calls: bool
    """Whether the output consists of tool calls only."""


async def prepare_prompt(served: ServedModel, settings: ServerSettings, conversation: Conversation) -> PreparedPrompt:
    """Renders a conversation in a worker thread: a chat template may be slow.

    Raises ApiError, ChatTemplateError, TokenizerError, InvalidParameterError.
    """
    return await WORKERS.run(_prepare, served, settings, conversation)


def _prepare(served: ServedModel, settings: ServerSettings, conversation: Conversation) -> PreparedPrompt:
    tools = list(conversation.tools) if conversation.tool_choice != NONE else []
    names = check_tools(conversation.tools)
    structure = conversation.structure
    forced = tools if conversation.tool_choice == REQUIRED else _named_tool(conversation.tool_choice, tools, names)
    if conversation.tool_choice not in (NONE, AUTO) and not forced:
        raise InvalidParameterError("tool_choice", conversation.tool_choice, "none or auto without tools")
    if tools and structure is not None:
        raise unsupported("tools", "tools are not supported with structured output, which would forbid their calls")
    if forced:
        structure = tool_call_schema(
            forced,
            several=conversation.parallel_tool_calls and conversation.tool_choice == REQUIRED,
            strict=conversation.strict_tools,
        )
        message_format = MessageFormat(FORCED_FORM, tools=forced)
    else:
        message_format = _template_message_format(served, settings, conversation, tools)
    prompt = served.llm.chat_prompt(
        conversation.messages,
        chat_template=conversation.chat_template or settings.chat_template,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        tools=tools or None,
        documents=conversation.documents,
        chat_template_kwargs=conversation.template_arguments or None,
    )
    return PreparedPrompt(prompt, message_format, structure, bool(forced))


def _template_message_format(
    served: ServedModel, settings: ServerSettings, conversation: Conversation, tools: Sequence[Mapping[str, Any]]
) -> MessageFormat | None:
    # A structured output has no reasoning before it.
    reasoning = settings.reasoning_parser if conversation.structure is None else None
    chosen = served.llm.message_format(
        settings.tool_call_parser if tools else None,
        reasoning,
        tools=tools or None,
        chat_template=conversation.chat_template or settings.chat_template,
    )
    if tools and (chosen is None or chosen.tool_call_parser is None):
        raise unsupported(
            "tools",
            f"the format of tool calls of {served.name} is not known from its chat template; set tool_choice to "
            "required or to a function, or start the server with --tool-call-parser",
        )
    return chosen


def check_reasoning_supported(field: str, served: ServedModel, settings: ServerSettings) -> None:
    """Raises ApiError where a field asks for reasoning and the model's format of reasoning is not known."""
    if served.llm.message_format(None, settings.reasoning_parser) is None:
        raise unsupported(
            field,
            f"{field} is not supported: the format of reasoning of {served.name} is not known from its chat template; "
            "start the server with --reasoning-parser",
        )


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the functions, which must differ.

    Raises InvalidParameterError.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameterError("tools", len(tools), f"a list of at most {MAX_TOOLS} tools")
    names: dict[str, int] = {}
    for index, tool in enumerate(tools):
        function: object = tool.get("function")
        name = cast("Mapping[str, object]", function).get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise InvalidParameterError(f"tools[{index}]", tool, 'a tool of type "function" with a named function')
        if name in names:
            raise InvalidParameterError(f"tools[{index}]", name, f"a tool with a name other than tools[{names[name]}]")
        names[name] = index
    return list(names)


def tool_call_schema(
    tools: Sequence[Mapping[str, Any]], *, several: bool, strict: Set[str] = frozenset()
) -> StructuredOutputsParams:
    """Returns the structure of a JSON list of one call of a tool, or with `several` of any number of calls.

    `strict` has the names of the tools whose schemas are read as OpenAI's `strict` defines.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": {"$ref": f"{DEFINITIONS}{index}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": _definitions(tools, strict),
    }
    one_or_more = schema if several else {**schema, "maxItems": 1}
    # Small models would otherwise generate white space until the token limit.
    return StructuredOutputsParams(json=one_or_more, disable_any_whitespace=True)


def _definitions(tools: Sequence[Mapping[str, Any]], strict: Set[str]) -> dict[str, Any]:
    """Returns the schemas of the arguments, with their references rebased to their new place.

    Raises InvalidParameterError.
    """
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        schema: object = tool["function"].get("parameters") or {"type": "object"}
        if tool["function"]["name"] in strict:
            schema = strict_schema(schema)
        try:
            definitions[str(index)] = _rebase_references(schema, index)
        except RecursionError:
            field = f"tools[{index}].function.parameters"
            raise InvalidParameterError(field, {}, "a schema with less nesting") from None
    return definitions


def _rebase_references(schema: object, index: int) -> object:
    if isinstance(schema, Mapping):
        return {
            key: f"{DEFINITIONS}{index}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _rebase_references(value, index)
            for key, value in cast("Mapping[str, object]", schema).items()
        }
    if isinstance(schema, list):
        return [_rebase_references(value, index) for value in cast("list[object]", schema)]
    return schema


def _named_tool(choice: str, tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    kind, _, name = choice.partition(":")
    if kind != "function":
        return []
    if name not in names:
        limit = f"the name of a tool ({', '.join(names) or 'there are none'})"
        raise InvalidParameterError("tool_choice.function.name", name, limit)
    return [tools[names.index(name)]]
