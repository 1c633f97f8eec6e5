"""Messages and tools of conversations, as OpenAI's API has them: what may stand in them, and what templates get of it.

A field that is not listed here is refused by name, and so is a role: a template would pass over what it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedList
from ferrule.server.schema.unions import StrOrObject, str_or_list


class TextPart(RequestModel):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


TextOrParts = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[TextPart], Tag("<list>")], Discriminator(str_or_list)
]


class CalledFunction(RequestModel):
    """Which function was called, and how."""

    name: str
    arguments: StrOrObject | None = None
    """JSON; templates that read maps get one."""


class MessageToolCall(RequestModel):
    """A call that the model made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Of a stream's deltas; the order says it."""


class Message(RequestModel):
    """A turn. What the answers of OpenAI's API have beside these fields may come back, where it says nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrParts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """What the model thought; by the next two names too."""
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: BoundedList[MessageToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)

    @model_validator(mode="after")
    def _is_of_its_role(self) -> Message:
        reasons = self.reasoning_content or self.reasoning or self.thinking
        if self.role != "assistant" and (self.tool_calls or reasons):
            found = {"found": "tool_calls" if self.tool_calls else "reasoning", "role": self.role}
            raise PydanticCustomError("foreign_field", "it has {found}, which a {role}'s has not", found)
        if self.role != "tool" and self.tool_call_id is not None:
            raise PydanticCustomError("foreign_field", "it has a tool_call_id, which a tool's alone has")
        if self.content is None and not (self.tool_calls or reasons):
            limit = "its content must be text or parts; an assistant's that calls or reasons may have none"
            raise PydanticCustomError("missing_content", limit)
        return self


def for_template(given: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates read them: with what they have, and no word of what they have not.

    Templates add to a content without asking whether there is one, so that none is an empty one.
    """
    unread = {"tool_calls": {"__all__": {"index"}}, "annotations": True}
    return [{"content": ""} | message.model_dump(exclude_none=True, exclude=unread) for message in given]
