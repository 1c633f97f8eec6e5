"""Chat templates: from messages to the text that a model was trained on."""

from ferrule._text.chat.conversation import adapt_messages
from ferrule._text.chat.render import Message, render_chat
from ferrule._text.chat.tools import Tool, tool_schemas

__all__ = ["Message", "Tool", "adapt_messages", "render_chat", "tool_schemas"]
