"""Messages of conversations in OpenAI's form, and their conversion for chat templates.

Roles are validated here: a chat template would ignore a role that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from ferrule.server.openai.fields import CALL_FIELDS, MESSAGE_FIELDS
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.custom_tools import custom_arguments, tool_kind
from ferrule.server.schema.images import ImagePart, part_kind
from ferrule.server.schema.limits import BoundedList
from ferrule.server.schema.unions import StrOrObject, str_or_list


class TextPart(RequestModel):
    """Text part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")],
    Discriminator(part_kind),
]
TextOrParts = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[Part], Tag("<list>")], Discriminator(str_or_list)
]


class CalledFunction(RequestModel):
    """Name and arguments of a called function."""

    other_fields = CALL_FIELDS

    name: str
    arguments: StrOrObject | None = None
    """Arguments as JSON text or as an object; templates get the form that they read."""


class MessageToolCall(RequestModel):
    """Tool call of the model."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted without effect: index of a call in a stream."""

    def for_template(self) -> dict[str, Any]:
        """Returns the call for chat templates."""
        return self.model_dump(exclude_none=True, exclude={"index"})


class CalledCustomTool(RequestModel):
    """Name and input of a called custom tool."""

    name: str
    input: str


class CustomToolCall(RequestModel):
    """Call of a custom tool."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustomTool
    index: int | None = None
    """Accepted without effect, as of other calls."""

    def for_template(self) -> dict[str, Any]:
        """Returns the call for chat templates, as that of a function."""
        function = {"name": self.custom.name, "arguments": custom_arguments(self.custom.input)}
        return ({} if self.id is None else {"id": self.id}) | {"type": "function", "function": function}


AnyToolCall = Annotated[
    Annotated[MessageToolCall, Tag("<function>")] | Annotated[CustomToolCall, Tag("<custom>")],
    Discriminator(tool_kind),
]


class Message(RequestModel):
    """Message of a conversation."""

    other_fields = MESSAGE_FIELDS

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrParts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Reasoning of the model; the next two names mean the same."""
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: BoundedList[AnyToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        reasoning = self.reasoning_content or self.reasoning or self.thinking
        if self.role != "assistant" and (self.tool_calls or reasoning):
            found = {"found": "tool_calls" if self.tool_calls else "reasoning", "role": self.role}
            raise PydanticCustomError("wrong_role", "has {found}, which is not allowed in {role} messages", found)
        if self.role != "tool" and self.tool_call_id is not None:
            message = "has tool_call_id, which is allowed in tool messages only"
            raise PydanticCustomError("wrong_role", message)
        if self.content is None and not (self.tool_calls or reasoning):
            message = "must have content; only assistant messages with tool_calls or reasoning may have none"
            raise PydanticCustomError("missing_content", message)
        return self


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Converts messages for `LLM.chat_prompt`, without the fields that are absent.

    Absent content becomes the empty string: templates concatenate it unchecked.
    """
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    content = message.content or ""
    if not isinstance(content, str):
        content = [
            part.source(f"{where}.content[{index}]") if isinstance(part, ImagePart) else part.model_dump()
            for index, part in enumerate(content)
        ]
    fields = {"content": content} | message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    if message.tool_calls is not None:
        fields["tool_calls"] = [call.for_template() for call in message.tool_calls]
    return fields
