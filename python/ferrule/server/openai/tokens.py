"""POST /tokenize and /detokenize (vLLM's routes)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ferrule._engine.workers import WORKERS
from ferrule.errors import InvalidParameterError
from ferrule.server.context import Context
from ferrule.server.errors import call_fields
from ferrule.server.models import Served
from ferrule.server.openai.messages import declared, for_template
from ferrule.server.openai.protocol import DetokenizeRequest, Text, TokenizeRequest, Tokens
from ferrule.server.reading import BodyRoute


def router(server: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(asked: TokenizeRequest) -> Response:
        """The ids of a text, or of a conversation as its template writes it."""
        served = server.models.find(asked.model)
        if asked.messages is not None:
            call_fields({"prompt": "messages"})
        return Response(await WORKERS.run(_tokenize, served, asked), media_type="application/json")

    @routes.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> Text:
        """The text of ids, special tokens among it."""
        served = server.models.find(asked.model)
        call_fields({"prompt": "tokens", "prompt_token_ids": "tokens"})
        return Text(prompt=await WORKERS.run(served.llm.detokenize, asked.tokens, skip_special_tokens=False))

    return routes


def _tokenize(served: Served, asked: TokenizeRequest) -> str:
    """The answer as it is sent: of a million tokens, even writing it takes a while."""
    tokens = _tokens(served, asked)
    texts = [served.llm.token_text(token) for token in tokens] if asked.return_token_strs else None
    limit: int = served.info["max_model_len"]
    answer = Tokens(count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=texts)
    return answer.model_dump_json(exclude_none=True)


def _tokens(served: Served, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidParameterError("messages or prompt must be given, and not both")
    if asked.prompt is not None:
        return served.llm.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    if asked.add_special_tokens:
        raise InvalidParameterError("add_special_tokens is true with messages; their template writes special tokens")
    prompt = served.llm.chat_prompt(
        for_template(asked.messages or []),
        chat_template=asked.chat_template,
        add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
        continue_final_message=asked.continue_final_message,
        tools=declared(asked.tools) if asked.tools else None,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    return list(prompt["prompt_token_ids"])
