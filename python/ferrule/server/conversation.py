"""Conversations with tools, as any API asks for them: what the model reads, and how its answer is to be read.

How tools are chosen: `auto` leaves it to the model, which writes calls in its own form. `required`, or a name, holds
the output to a JSON list of calls, whatever the model; such an output has no reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ferrule._engine.workers import WORKERS
from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.parsers import MessageFormat
from ferrule._text.prompt import TokensPrompt
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError
from ferrule.server.errors import unsupported
from ferrule.server.models import ServedModel
from ferrule.server.schema.limits import MAX_TOOLS
from ferrule.server.settings import ServerSettings

NONE, AUTO, REQUIRED = "none", "auto", "required"
DEFINITIONS = "#/$defs/"
FORCED_FORM = "llama3_json"
"""The parser that reads a JSON list of calls."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in OpenAI's form, and what may follow."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = AUTO
    """`none`, `auto`, `required`, or `function:` and a name."""
    parallel_tool_calls: bool = True
    structure: StructuredOutputsParams | None = None
    """What the answer must be, for other reasons than tools."""
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False


@dataclass(frozen=True)
class PreparedPrompt:
    """What `AsyncLLM` needs."""

    prompt: TokensPrompt
    message_format: MessageFormat | None
    structure: StructuredOutputsParams | None
    only_calls: bool
    """Whether the answer is calls of tools and nothing else."""


async def prepare_prompt(served: ServedModel, settings: ServerSettings, conversation: Conversation) -> PreparedPrompt:
    """Renders a conversation, in a thread: templates may take their time.

    Raises ApiError, ChatTemplateError, TokenizerError, InvalidParameterError.
    """
    return await WORKERS.run(_prepare, served, settings, conversation)


def _prepare(served: ServedModel, settings: ServerSettings, conversation: Conversation) -> PreparedPrompt:
    tools = list(conversation.tools) if conversation.tool_choice != NONE else []
    names = check_tools(conversation.tools)
    structure = conversation.structure
    forced = tools if conversation.tool_choice == REQUIRED else _named_tool(conversation.tool_choice, tools, names)
    if conversation.tool_choice not in (NONE, AUTO) and not forced:
        raise InvalidParameterError(f"tool_choice is {shown(conversation.tool_choice)}; there are no tools")
    if tools and structure is not None:
        raise unsupported("tools", "tools are given beside a structure of the output, which would forbid their calls")
    if forced:
        structure = tool_call_schema(
            forced, several=conversation.parallel_tool_calls and conversation.tool_choice == REQUIRED
        )
        message_format = MessageFormat(FORCED_FORM, tools=forced)
    else:
        message_format = _template_message_format(served, settings, conversation, tools)
    prompt = served.llm.chat_prompt(
        conversation.messages,
        chat_template=conversation.chat_template,
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
    # An output of a given structure begins with it: there is no reasoning before.
    reasoning = settings.reasoning_parser if conversation.structure is None else None
    chosen = served.llm.message_format(
        settings.tool_call_parser if tools else None,
        reasoning,
        tools=tools or None,
        chat_template=conversation.chat_template,
    )
    if tools and (chosen is None or chosen.tool_call_parser is None):
        raise unsupported(
            "tools",
            f"{served.name} has no form of tool calls that its chat template tells; choose tool_choice required or a "
            "function, or start the server with tool_call_parser",
        )
    return chosen


def check_reasoning_supported(field: str, served: ServedModel, settings: ServerSettings) -> None:
    """Raises ApiError where a field asks a model to think of which it is not known how it does."""
    if served.llm.message_format(None, settings.reasoning_parser) is None:
        raise unsupported(
            field,
            f"{field} is asked for, but {served.name} has no form of reasoning that its chat template tells; start the "
            "server with reasoning_parser",
        )


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of functions, each once.

    Raises InvalidParameterError.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameterError(f"tools has {len(tools)} tools; the limit is {MAX_TOOLS}")
    names: dict[str, int] = {}
    for index, tool in enumerate(tools):
        function: object = tool.get("function")
        name = cast("Mapping[str, object]", function).get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            limit = 'an object of the type "function" with a function that has a name'
            raise InvalidParameterError(f"tools[{index}] is {shown(tool)}; it must be {limit}")
        if name in names:
            raise InvalidParameterError(f"tools[{index}] has the name {name!r} of another; names must differ")
        names[name] = index
    return list(names)


def tool_call_schema(tools: Sequence[Mapping[str, Any]], *, several: bool) -> StructuredOutputsParams:
    """A JSON list of one call of one of the tools, or more."""
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
        "$defs": _definitions(tools),
    }
    one_or_more = schema if several else {**schema, "maxItems": 1}
    # Given the choice, small models write white space for ever.
    return StructuredOutputsParams(json=one_or_more, disable_any_whitespace=True)


def _definitions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schemas of arguments, with their references to themselves led to where they stand now.

    Raises InvalidParameterError.
    """
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        try:
            definitions[str(index)] = _rebase_references(
                tool["function"].get("parameters") or {"type": "object"}, index
            )
        except RecursionError:
            raise InvalidParameterError(f"tools[{index}].function.parameters is nested too deeply") from None
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
        known = ", ".join(names) or "none"
        raise InvalidParameterError(f"tool_choice.function.name is {shown(name)}; it must be one of tools ({known})")
    return [tools[names.index(name)]]
