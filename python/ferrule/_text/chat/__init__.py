"""Chat templates, which render messages to the prompt format of a model."""

from ferrule._text.chat.conversation import adapt_messages
from ferrule._text.chat.described_tools import describe_tools, reads_tools
from ferrule._text.chat.images import ImageSource, data_url, take_images
from ferrule._text.chat.render import Message, render_chat
from ferrule._text.chat.tools import Tool, tool_schemas

__all__ = [
    "ImageSource",
    "Message",
    "Tool",
    "adapt_messages",
    "data_url",
    "describe_tools",
    "reads_tools",
    "render_chat",
    "take_images",
    "tool_schemas",
]
