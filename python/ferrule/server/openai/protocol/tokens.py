"""Requests and responses of the routes for tokenization and chat templates."""

from __future__ import annotations

from pydantic import BaseModel

from ferrule.server.openai.messages import Message
from ferrule.server.openai.protocol.chat import TemplateFields
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedList, TokenIds, ToolList
from ferrule.server.schema.response_fields import omitted_if_none
from ferrule.server.schema.tools import Tool


class TokenizeRequest(TemplateFields):
    """Request of POST /tokenize, with a text, in `prompt` or `content`, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: BoundedList[Message] | None = None
    add_special_tokens: bool | None = None
    """Whether to add special tokens to a text (default true); a chat template writes its own."""
    return_token_strs: bool = False
    content: str | None = None
    """Text, without special tokens unless `add_special` is true (llama.cpp's field)."""
    add_special: bool = False
    with_pieces: bool = False
    """Whether `tokens` is a list of objects with `id` and `piece` (llama.cpp's field)."""
    tools: ToolList[Tool] | None = None


class TemplateRequest(TemplateFields):
    """Request of POST /apply-template."""

    model: str | None = None
    messages: BoundedList[Message]
    tools: ToolList[Tool] | None = None


class DetokenizeRequest(RequestModel):
    """Request of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class TokenPiece(BaseModel):
    """A token with its text; its bytes where they are not UTF-8."""

    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    """Response of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = omitted_if_none()


class TokenizerInfo(BaseModel):
    """Response of GET /tokenizer_info."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


class Text(BaseModel):
    """Response of POST /detokenize."""

    prompt: str
    content: str
    """The same text (llama.cpp's name)."""


class Rendered(BaseModel):
    """Response of POST /apply-template."""

    prompt: str
