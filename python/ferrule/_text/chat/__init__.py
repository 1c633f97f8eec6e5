"""Chat templates, which render messages to the prompt format of a model."""

from ferrule._text.chat.conversation import adapt_messages
from ferrule._text.chat.described_tools import describe_tools, reads_tools
from ferrule._text.chat.render import Message, render_chat
from ferrule._text.chat.tools import Tool, tool_schemas

__all__ = ["Message", "Tool", "adapt_messages", "describe_tools", "reads_tools", "render_chat", "tool_schemas"]
