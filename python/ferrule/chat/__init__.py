"""Chat templates: from messages to the text that a model was trained on."""

from ferrule.chat.conversation import adapt_messages
from ferrule.chat.render import Message, Tool, render_chat

__all__ = ["Message", "Tool", "adapt_messages", "render_chat"]
