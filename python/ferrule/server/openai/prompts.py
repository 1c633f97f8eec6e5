"""Prompts of completions and chat completions: texts and token ids, truncated where the request asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ferrule._engine.workers import workers_for
from ferrule._text.prompt import Prompt, TextPrompt, TokensPrompt
from ferrule._validation import check_integer
from ferrule.errors import InvalidParameterError
from ferrule.server.models import ServedModel
from ferrule.server.openai.protocol.completions import CompletionRequest
from ferrule.server.openai.protocol.generation import GenerationFields

MAX_PROMPTS = 1024
"""Maximum number of prompts of a request."""
MIN_TEXT_LIMIT = 1 << 20
"""Characters of a text that every server tokenizes."""
CHARACTERS_PER_TOKEN = 8
"""Characters of a text that are tokenized for each token of the model's context, more than tokens have on average."""


def check_length(served: ServedModel, text: str) -> None:
    """Raises InvalidParameterError for a text that is too long to be tokenized whole."""
    limit = max(MIN_TEXT_LIMIT, CHARACTERS_PER_TOKEN * served.info["max_model_len"])
    if len(text) > limit:
        raise InvalidParameterError("prompt", len(text), f"a text of at most {limit} characters")


async def prompts_of(served: ServedModel, request: CompletionRequest, max_tokens: int | None) -> list[Prompt]:
    """Returns the prompts of a request for at most `max_tokens` tokens of output.

    Raises InvalidParameterError, TokenizerError.
    """
    given = request.prompt
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = cast("Sequence[str | list[int]]", given if several else [given])
    if len(prompts) > MAX_PROMPTS:
        raise InvalidParameterError("prompt", len(prompts), f"a list of at most {MAX_PROMPTS} prompts")
    return [await _prompt(served, request, prompt, max_tokens) for prompt in prompts]


async def _prompt(
    served: ServedModel, request: CompletionRequest, given: str | list[int], max_tokens: int | None
) -> Prompt:
    if request.suffix is not None:
        if not isinstance(given, str):
            raise InvalidParameterError("suffix", request.suffix, "left out with a prompt of token ids")
        if request.truncate_prompt_tokens is not None:
            raise InvalidParameterError("suffix", request.suffix, "left out with truncate_prompt_tokens")
    if isinstance(given, str) and request.truncate_prompt_tokens is not None:
        check_length(served, given)
        given = await workers_for().run(served.llm.tokenize, given)
    if isinstance(given, str):
        text: TextPrompt = {"prompt": given}
        if request.suffix is not None:
            text["suffix"] = request.suffix
        if request.cache_salt is not None:
            text["cache_salt"] = request.cache_salt
        return text
    return tokens_prompt(served, request, {"prompt_token_ids": given}, max_tokens)


def tokens_prompt(
    served: ServedModel, request: GenerationFields, prompt: TokensPrompt, max_tokens: int | None
) -> TokensPrompt:
    """Returns a prompt of token ids, with the request's salt, and truncated to its last tokens (vLLM's field).

    A truncation to -1 tokens keeps as many as leave room for the output.

    Raises InvalidParameterError.
    """
    kept = request.truncate_prompt_tokens
    if kept is not None:
        if "multi_modal_data" in prompt:
            raise InvalidParameterError("truncate_prompt_tokens", kept, "left out with images")
        limit: int = served.info["max_model_len"]
        if check_integer("truncate_prompt_tokens", kept, -1, limit) == 0:
            raise InvalidParameterError("truncate_prompt_tokens", kept, f"-1 or an integer from 1 to {limit}")
        most = max(limit - (max_tokens or 1), 1) if kept == -1 else kept
        if len(prompt["prompt_token_ids"]) > most:
            prompt = {"prompt_token_ids": prompt["prompt_token_ids"][-most:]}
    return prompt if request.cache_salt is None else {**prompt, "cache_salt": request.cache_salt}
