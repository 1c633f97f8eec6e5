"""Conversations with tools, for all protocols: rendering of the prompt and format of the output.

Tool choice `auto` leaves the choice to the model, which writes calls in its own format. `required` and a named tool
constrain the output of any model to a JSON list of calls; such an output has no reasoning. With `auto` and a JSON
schema, the output is either calls or an answer that matches the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

from ferrule._engine.workers import workers_for
from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.parsers import MessageFormat
from ferrule._text.prompt import TokensPrompt
from ferrule.errors import InvalidParameterError
from ferrule.server.call_structure import JSON_CALLS, CallOrAnswer, text_with_calls, tool_call_schema
from ferrule.server.errors import unsupported
from ferrule.server.models import ServedModel
from ferrule.server.schema.limits import MAX_TOOLS
from ferrule.server.settings import ServerSettings

NONE, AUTO, REQUIRED = "none", "auto", "required"


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
    parse_reasoning: bool = True
    """Whether reasoning is apart from the content; with tools and a structure it always is."""


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
    return await workers_for().run(_prepare, served, settings, conversation)


def _prepare(served: ServedModel, settings: ServerSettings, conversation: Conversation) -> PreparedPrompt:
    tools = list(conversation.tools) if conversation.tool_choice != NONE else []
    names = check_tools(conversation.tools)
    structure = conversation.structure
    forced = tools if conversation.tool_choice == REQUIRED else _named_tool(conversation.tool_choice, tools, names)
    if conversation.tool_choice not in (NONE, AUTO) and not forced:
        raise InvalidParameterError("tool_choice", conversation.tool_choice, "none or auto without tools")
    if forced:
        structure = tool_call_schema(
            forced,
            several=conversation.parallel_tool_calls and conversation.tool_choice == REQUIRED,
            strict=conversation.strict_tools,
        )
        message_format = MessageFormat(JSON_CALLS, tools=forced)
    elif tools and structure is not None:
        message_format, structure = _call_or_answer(served, settings, conversation, structure)
    else:
        message_format = _template_message_format(served, settings, conversation, tools)
        if conversation.strict_tools and tools and message_format is not None:
            structure = text_with_calls(tools, conversation.strict_tools, message_format, served.llm)
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


def _call_or_answer(
    served: ServedModel, settings: ServerSettings, conversation: Conversation, answer: StructuredOutputsParams
) -> tuple[MessageFormat, StructuredOutputsParams]:
    """Returns the format and the structure of an output that calls tools or answers with JSON.

    A model whose calls begin with a marker writes them in its own format, any other as JSON.
    """
    if answer.json is None and answer.json_object is None:
        raise unsupported("tools", "tools are supported with a JSON schema, not with other structured output")
    tools = list(conversation.tools)
    own = _message_format(served, settings, conversation, tools, (settings.tool_call_parser, None))
    given = CallOrAnswer(
        answer=answer, tools=tools, several=conversation.parallel_tool_calls, strict=conversation.strict_tools
    )
    if own is not None and own.call_begin:
        return own, given.in_format(own, served.llm)
    return MessageFormat(JSON_CALLS, tools=tools), given.as_json()


def _template_message_format(
    served: ServedModel, settings: ServerSettings, conversation: Conversation, tools: Sequence[Mapping[str, Any]]
) -> MessageFormat | None:
    # A structured output has no reasoning before it.
    parsed = conversation.structure is None and conversation.parse_reasoning
    reasoning = settings.reasoning_parser if parsed else None
    parsers = (settings.tool_call_parser if tools else None, reasoning)
    chosen = _message_format(served, settings, conversation, tools or None, parsers)
    if tools and (chosen is None or chosen.tool_call_parser is None):
        raise unsupported(
            "tools",
            f"the format of tool calls of {served.name} is not known from its chat template; set tool_choice to "
            "required or to a function, or start the server with --tool-call-parser",
        )
    return chosen


def _message_format(
    served: ServedModel,
    settings: ServerSettings,
    conversation: Conversation,
    tools: Sequence[Mapping[str, Any]] | None,
    parsers: tuple[str | None, str | None],
) -> MessageFormat | None:
    template = conversation.chat_template
    return served.llm.message_format(
        *parsers,
        tools=tools,
        chat_template=template or settings.chat_template,
        # Derivation renders a template about ten times, and a request's own template may be slow.
        derive=not template or template in served.llm.chat_templates,
    )


def check_reasoning_supported(field: str, served: ServedModel, settings: ServerSettings) -> None:
    """Raises ApiError where a field asks for reasoning and the model's format of reasoning is not known."""
    if served.llm.message_format(None, settings.reasoning_parser, chat_template=settings.chat_template) is None:
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


def _named_tool(choice: str, tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    kind, _, name = choice.partition(":")
    if kind != "function":
        return []
    if name not in names:
        limit = f"the name of a tool ({', '.join(names) or 'there are none'})"
        raise InvalidParameterError("tool_choice.function.name", name, limit)
    return [tools[names.index(name)]]
