"""Options of a chat template, declared once for every method that renders a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ferrule._params.compatibility import Ignored, Refused, Rules
from ferrule._text.chat.tools import Tool


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.chat`, `LLM.chat_prompt` and `LLM.apply_chat_template`."""

    chat_template: str | None
    """Template, or the name of one of the model's templates. None: `tool_use` if there are tools, else `default`."""
    add_generation_prompt: bool
    """Whether the prompt ends with the beginning of an answer; True by default."""
    continue_final_message: bool | str
    """Whether the model continues the last message instead of answering it; False by default. The name of a field, such
    as `reasoning_content`, continues that field instead of the content. Requires `add_generation_prompt=False`."""
    tools: Sequence[Tool] | None
    """Tools as JSON schemas, or as functions with type hints and a docstring."""
    documents: Sequence[Mapping[str, Any]] | None
    """Documents for templates that read them."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables of the template, such as `enable_thinking`."""


FOREIGN: Rules = {
    "chat_template_content_format": Ignored("auto", "messages are adapted to the template"),
    "mm_processor_kwargs": Refused(None, "messages are text"),
    "tokenization_kwargs": Refused(None, "pass token ids to generate"),
}
"""Chat arguments of vLLM that ferrule does not have."""
