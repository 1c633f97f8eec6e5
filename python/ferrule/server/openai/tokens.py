"""POST /tokenize and /detokenize, and GET /tokenizer_info (vLLM's routes)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._engine.workers import workers_for
from ferrule.errors import InvalidParameterError
from ferrule.server.context import Context
from ferrule.server.models import ServedModel
from ferrule.server.openai.messages import template_messages
from ferrule.server.openai.prompts import check_length
from ferrule.server.openai.protocol import DetokenizeRequest, Text, TokenizeRequest, TokenizerInfo, Tokens
from ferrule.server.request_body import BodyRoute
from ferrule.server.request_record import name_fields
from ferrule.server.schema.tools import tool_dicts

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(request: TokenizeRequest) -> Response:
        """Tokenizes a text, or a conversation that the chat template renders."""
        served = server.models.find(request.model)
        if request.messages is not None:
            name_fields({"prompt": "messages"})
        return Response(await workers_for().run(_tokenize, served, request), media_type="application/json")

    @routes.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> Text:
        """Converts token ids to text, with special tokens."""
        served = server.models.find(request.model)
        name_fields({"prompt": "tokens", "prompt_token_ids": "tokens"})
        return Text(prompt=await workers_for().run(served.llm.detokenize, request.tokens, skip_special_tokens=False))

    if server.settings.tokenizer_info:

        @routes.get("/tokenizer_info")
        async def tokenizer_info(model: str | None = None) -> TokenizerInfo:
            """Returns the special tokens, the limit and the chat template of a model (vLLM's route)."""
            served = server.models.find(model)
            tokenizer = served.llm.get_tokenizer()
            return TokenizerInfo(
                tokenizer_class=type(tokenizer).__name__,
                vocab_size=tokenizer.vocab_size,
                model_max_length=served.info["max_model_len"],
                chat_template=server.settings.chat_template or tokenizer.chat_template,
                **{name: getattr(tokenizer, name) for name in SPECIAL_TOKENS},
            )

    return routes


def _tokenize(served: ServedModel, request: TokenizeRequest) -> str:
    """Returns the response as JSON text: serializing a million tokens blocks as long as tokenizing them."""
    tokens = _tokens(served, request)
    texts = [served.llm.token_text(token) for token in tokens] if request.return_token_strs else None
    limit: int = served.info["max_model_len"]
    answer = Tokens(count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=texts)
    return answer.model_dump_json(exclude_none=True)


def _tokens(served: ServedModel, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidParameterError("prompt", request.prompt, "given exactly where messages is left out")
    if request.prompt is not None:
        check_length(served, request.prompt)
        return served.llm.tokenize(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise InvalidParameterError(
            "add_special_tokens", True, "left out with messages, whose chat template writes special tokens"
        )
    prompt = served.llm.chat_prompt(
        template_messages(request.messages or []),
        chat_template=request.chat_template,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        tools=tool_dicts(request.tools) if request.tools else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return list(prompt["prompt_token_ids"])
