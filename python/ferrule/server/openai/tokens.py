"""POST /tokenize, /detokenize and /apply-template, and GET /tokenizer_info (vLLM's and llama.cpp's routes)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._engine.workers import workers_for
from ferrule._text.prompt import TokensPrompt
from ferrule.errors import InvalidParameterError
from ferrule.server.context import Context
from ferrule.server.models import ServedModel
from ferrule.server.openai.messages import template_messages
from ferrule.server.openai.prompts import check_length
from ferrule.server.openai.protocol.tokens import (
    DetokenizeRequest,
    Rendered,
    TemplateRequest,
    Text,
    TokenizeRequest,
    TokenizerInfo,
    TokenPiece,
    Tokens,
)
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.schema.base import one_of
from ferrule.server.schema.tools import tool_dicts

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(request: TokenizeRequest) -> Response:
        """Tokenizes a text, or a conversation that the chat template renders."""
        served = await server.lease(request.model)
        if request.messages is not None:
            name_fields({"prompt": "messages"})
        template = request.chat_template or server.settings.chat_template
        return Response(await workers_for().run(_tokenize, served, request, template), media_type="application/json")

    @routes.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> Text:
        """Converts token ids to text, with special tokens."""
        served = await server.lease(request.model)
        name_fields({"prompt": "tokens", "prompt_token_ids": "tokens"})
        text = await workers_for().run(served.llm.detokenize, request.tokens, skip_special_tokens=False)
        return Text(prompt=text, content=text)

    @routes.post("/apply-template")
    async def apply_template(request: TemplateRequest) -> Rendered:
        """Renders a conversation with the chat template (llama.cpp's route)."""
        served = await server.lease(request.model)
        name_fields({"prompt": "messages"})
        template = request.chat_template or server.settings.chat_template
        prompt = await workers_for().run(_render, served, request, template)
        return Rendered(prompt=prompt.get("prompt", ""))

    if server.settings.tokenizer_info:

        @routes.get("/tokenizer_info")
        async def tokenizer_info(model: str | None = None) -> TokenizerInfo:
            """Returns the special tokens, the limit and the chat template of a model (vLLM's route)."""
            served = await server.lease(model)
            tokenizer = served.llm.get_tokenizer()
            return TokenizerInfo(
                tokenizer_class=type(tokenizer).__name__,
                vocab_size=tokenizer.vocab_size,
                model_max_length=served.info["max_model_len"],
                chat_template=server.settings.chat_template or tokenizer.chat_template,
                **{name: getattr(tokenizer, name) for name in SPECIAL_TOKENS},
            )

    return routes


def _tokenize(served: ServedModel, request: TokenizeRequest, chat_template: str | None) -> str:
    """Returns the response as JSON text: serializing a million tokens blocks as long as tokenizing them."""
    ids = _tokens(served, request, chat_template)
    texts = [served.llm.token_text(token) for token in ids] if request.return_token_strs else None
    limit: int = served.info["max_model_len"]
    tokens = [_piece(served, token) for token in ids] if request.with_pieces else ids
    answer = Tokens(count=len(ids), max_model_len=limit, tokens=tokens, token_strs=texts)
    return answer.model_dump_json(exclude_none=True)


def _piece(served: ServedModel, token: int) -> TokenPiece:
    found = served.llm.token_bytes(token)
    try:
        return TokenPiece(id=token, piece=served.llm.token_text(token) if found is None else found.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=token, piece=list(found or b""))


def _tokens(served: ServedModel, request: TokenizeRequest, chat_template: str | None) -> list[int]:
    text: str | None = one_of(request, "prompt", "content")
    if (text is None) == (request.messages is None):
        raise InvalidParameterError("prompt", text, "given exactly where messages is left out")
    if text is not None:
        check_length(served, text)
        with_special = request.add_special if request.prompt is None else request.add_special_tokens is not False
        return served.llm.tokenize(text, add_special_tokens=with_special)
    if request.add_special_tokens:
        raise InvalidParameterError(
            "add_special_tokens", True, "left out with messages, whose chat template writes special tokens"
        )
    return list(_render(served, request, chat_template)["prompt_token_ids"])


def _render(served: ServedModel, request: TokenizeRequest | TemplateRequest, chat_template: str | None) -> TokensPrompt:
    return served.llm.chat_prompt(
        template_messages(request.messages or []),
        chat_template=chat_template,
        add_generation_prompt=request.begins_answer,
        continue_final_message=request.continue_final_message,
        tools=tool_dicts(request.tools) if request.tools else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
