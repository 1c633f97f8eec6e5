"""Conversion of input items to the conversation that a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferrule._params.closed_objects import strict_schema
from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.chat import ImageSource
from ferrule.errors import InvalidParameterError
from ferrule.server.conversation import AUTO, NONE, Conversation
from ferrule.server.responses.carried_reasoning import unwrap_reasoning
from ferrule.server.responses.protocol import (
    CustomCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    ImagePart,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
    Tool,
    ToolChoice,
)
from ferrule.server.schema.custom_tools import custom_arguments, custom_function


def conversation(request: ResponsesRequest) -> Conversation:
    """Converts a request to a conversation in the form of chat completions.

    Raises InvalidParameterError.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += _messages(request.input)
    choice = request.tool_choice
    if isinstance(choice, ToolChoice):
        choice = f"function:{choice.name}"
    arguments: Mapping[str, Any] = request.chat_template_kwargs or {}
    if request.reasoning is not None and request.reasoning.effort is not None:
        arguments = {"reasoning_effort": request.reasoning.effort, **arguments}
    return Conversation(
        messages=messages,
        tools=[{"type": "function", "function": _function(tool)} for tool in request.tools or ()],
        strict_tools=_strict_names(request.tools or ()),
        tool_choice=choice or (AUTO if request.tools else NONE),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        structure=structure(request),
        template_arguments=arguments,
    )


def _function(tool: Tool) -> dict[str, Any]:
    """Returns the function that the model calls for a tool."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump(exclude={"type", "strict"}, exclude_none=True)
    return custom_function(tool.name, tool.description, tool.grammar)


def _strict_names(tools: Sequence[Tool]) -> set[str]:
    """Returns the names of the tools whose calls are constrained wherever their format allows it."""
    return {tool.name for tool in tools if tool.is_strict}


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Converts items to messages; adjacent reasoning, text and calls of the model become one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    """Message of the model to which the next item may belong."""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item:
            case MessageItem(role="assistant"):
                if turn is None or turn["content"] or "tool_calls" in turn:
                    turn = _turn(messages)
                turn["content"] = _content(item.content, f"{where}.content")
            case MessageItem():
                # Chat templates do not support developer messages.
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _content(item.content, f"{where}.content")})
                turn = None
            case FunctionCallItem() | CustomCallItem():
                turn = _turn(messages) if turn is None else turn
                function = {"name": item.name, "arguments": _arguments(item)}
                turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case FunctionCallOutputItem():
                content = _content(item.output, f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
                turn = None
            case ReasoningItem():
                if turn is None or len(turn) > len(_EMPTY_TURN) or turn["content"]:
                    turn = _turn(messages)
                turn["reasoning_content"] = _reasoning(item)
    return messages


def _arguments(item: FunctionCallItem | CustomCallItem) -> str:
    if isinstance(item, FunctionCallItem):
        return item.arguments
    return custom_arguments(item.input)


def _reasoning(item: ReasoningItem) -> str:
    if item.content is not None or item.encrypted_content is None:
        return "".join(part.text for part in item.content or ())
    return unwrap_reasoning(item.encrypted_content)


_EMPTY_TURN: dict[str, Any] = {"role": "assistant", "content": ""}


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append(dict(_EMPTY_TURN))
    return messages[-1]


def _content(given: str | Sequence[Part], where: str) -> str | list[dict[str, str] | ImageSource]:
    if isinstance(given, str):
        return given
    return [
        ImageSource(part.image_url, f"{where}[{index}].image_url")
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for index, part in enumerate(given)
    ]


def structure(request: ResponsesRequest) -> StructuredOutputsParams | None:
    """Returns the structure of the answer's text.

    Raises InvalidParameterError.
    """
    form = None if request.text is None else request.text.format
    if request.structured_outputs is not None:
        if form is not None and form.type != "text":
            limit = "left out with text.format; both mean the same"
            raise InvalidParameterError("structured_outputs", request.structured_outputs.model_dump(), limit)
        return request.structured_outputs.params()
    if isinstance(form, SchemaFormat):
        schema = strict_schema(form.json_schema) if form.strict else form.json_schema
        return StructuredOutputsParams(json=schema)
    return StructuredOutputsParams(json_object=True) if form is not None and form.type == "json_object" else None
