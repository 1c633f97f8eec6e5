"""Conversion of messages made of blocks to the conversation that a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.chat import ImageSource
from ferrule.errors import InvalidParameterError
from ferrule.server.anthropic.protocol import (
    MIN_THINKING_BUDGET,
    CountTokensRequest,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    NamedChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from ferrule.server.conversation import AUTO, NONE, REQUIRED, Conversation
from ferrule.server.errors import BAD_REQUEST, ApiError, unsupported

CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}
Turn = dict[str, Any]


def conversation(request: CountTokensRequest) -> Conversation:
    """Converts a request to a conversation in OpenAI's form. The answer continues a last message of the assistant.

    Raises ApiError, InvalidParameterError.
    """
    turns: list[Turn] = []
    if request.system is not None:
        turns.append({"role": "system", "content": _text(request.system)})
    for index, message in enumerate(request.messages):
        _add(turns, message, f"messages[{index}]")
    prefilled = bool(turns) and turns[-1]["role"] == "assistant"
    if prefilled and "tool_calls" in turns[-1]:
        message = "messages must not end with a tool_use block; its tool_result must follow"
        raise ApiError(BAD_REQUEST, message, code="invalid_value", param="messages")
    choice = request.tool_choice
    if choice is None:
        chosen = AUTO if request.tools else NONE
    else:
        chosen = f"function:{choice.name}" if isinstance(choice, NamedChoice) else CHOICES[choice.type]
    return Conversation(
        messages=turns,
        tools=[
            {
                "type": "function",
                "function": {"name": tool.name, "parameters": tool.input_schema}
                | ({} if tool.description is None else {"description": tool.description}),
            }
            for tool in request.tools or ()
        ],
        tool_choice=chosen,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        structure=_structure(request),
        template_arguments=_template_arguments(request),
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
    )


def check_thinking(request: MessagesRequest) -> None:
    """Raises InvalidParameterError."""
    thinking = request.thinking
    if thinking is None or thinking.budget_tokens is None:
        return
    budget = thinking.budget_tokens
    if thinking.type != "enabled":
        raise InvalidParameterError("thinking.budget_tokens", budget, "left out unless thinking.type is enabled")
    if not MIN_THINKING_BUDGET <= budget < request.max_tokens:
        limit = f"at least {MIN_THINKING_BUDGET} and less than max_tokens ({request.max_tokens})"
        raise InvalidParameterError("thinking.budget_tokens", budget, limit)


def _add(turns: list[Turn], message: InputMessage, where: str) -> None:
    """Appends a message; adjacent messages of a role are merged, for templates that require alternating roles."""
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [TextBlock(type="text", text=blocks)]
    for index, block in enumerate(blocks):
        role = "tool" if isinstance(block, ToolResultBlock) else message.role
        if isinstance(block, (ThinkingBlock, ToolUseBlock)) and role != "assistant":
            field = f"{where}.content[{index}]"
            raise unsupported(field, f"{field}: {block.type} is not allowed in {role} messages")
        if role == "tool" and message.role != "user":
            field = f"{where}.content[{index}]"
            raise unsupported(field, f"{field}: tool_result is allowed in user messages only")
        match block:
            case ToolResultBlock():
                turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": ""})
                _add_result(turns[-1], block, f"{where}.content[{index}].content")
            case TextBlock():
                _add_text(_turn(turns, role), block.text)
            case ImageBlock():
                _add_image(_turn(turns, role), block.given(f"{where}.content[{index}]"))
            case ThinkingBlock():
                turn = _turn(turns, role)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": function}
                _turn(turns, role).setdefault("tool_calls", []).append(call)
    if not blocks:
        _turn(turns, message.role)


def _turn(turns: list[Turn], role: str) -> Turn:
    """Returns the last message if it has this role, else a new one."""
    if not turns or turns[-1]["role"] != role or role == "system":
        turns.append({"role": role, "content": ""})
    return turns[-1]


def _add_text(turn: Turn, text: str) -> None:
    """Appends text to the content of a message, after a line break if text precedes it."""
    content = turn["content"]
    if isinstance(content, str):
        turn["content"] = f"{content}\n{text}" if content else text
    elif isinstance(content[-1], ImageSource):
        content.append({"type": "text", "text": text})
    else:
        content[-1]["text"] += f"\n{text}"


def _add_image(turn: Turn, image: ImageSource) -> None:
    """Appends an image to the content of a message, which becomes a list of parts."""
    content = turn["content"]
    if isinstance(content, str):
        turn["content"] = [{"type": "text", "text": content}, image] if content else [image]
    else:
        content.append(image)


def _add_result(turn: Turn, block: ToolResultBlock, where: str) -> None:
    """Appends the content of a tool's result to its message."""
    blocks = [TextBlock(type="text", text=block.content)] if isinstance(block.content, str) else block.content
    for index, part in enumerate(blocks):
        if isinstance(part, ImageBlock):
            _add_image(turn, part.given(f"{where}[{index}]"))
        else:
            _add_text(turn, part.text)
    if block.is_error:
        content = turn["content"]
        if isinstance(content, str):
            turn["content"] = f"Error: {content}"
        else:
            content.insert(0, {"type": "text", "text": "Error: "})


def _text(given: str | Sequence[TextBlock]) -> str:
    return given if isinstance(given, str) else "\n".join(block.text for block in given)


def _structure(request: CountTokensRequest) -> StructuredOutputsParams | None:
    if request.output_config is None or request.output_config.format is None:
        return None
    return StructuredOutputsParams(json=request.output_config.format.json_schema)


def _template_arguments(request: CountTokensRequest) -> Mapping[str, Any]:
    arguments: dict[str, Any] = {}
    if request.output_config is not None and request.output_config.effort is not None:
        arguments["reasoning_effort"] = request.output_config.effort
    if request.thinking is not None and request.thinking.type != "adaptive":
        # The names of Qwen's and DeepSeek's templates.
        arguments["enable_thinking"] = arguments["thinking"] = request.thinking.type == "enabled"
    return arguments
