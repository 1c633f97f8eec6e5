"""Log-probabilities of given continuations: pairing them with prompts, reading them, and the result."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias, cast

from ferrule._text.prompt import Prompt, check_token_ids
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError, PromptError
from ferrule.outputs import LoglikelihoodOutput, RequestOutput

Continuation: TypeAlias = str | Sequence[int]


def pair(prompts: Prompt | list[Prompt], continuations: object) -> list[tuple[Prompt, object]]:
    """Pairs continuations with prompts; a single prompt is paired with every continuation.

    Raises InvalidParameterError.
    """
    if isinstance(continuations, (bytes, bytearray)) or not isinstance(continuations, Sequence):
        raise InvalidParameterError(
            "continuations", cast("object", continuations), "text, token ids, or a list of either"
        )
    several = list(cast("Sequence[object]", continuations))
    if isinstance(continuations, str) or (several and _is_token_id(several[0])):
        several = [cast("object", continuations)]
    if not isinstance(prompts, list):
        return [(prompts, continuation) for continuation in several]
    if len(prompts) != len(several):
        raise InvalidParameterError("continuations", several, f"a list of {len(prompts)}, one for each prompt")
    return list(zip(prompts, several, strict=True))


def _is_token_id(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        return False
    return True


def read_continuation(continuation: object, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Returns the token ids of a continuation, which has at least one.

    Raises PromptError, TokenizerError.
    """
    text = isinstance(continuation, str)
    ids = tokenizer.encode(continuation, add_special_tokens=False) if text else continuation
    try:
        return check_token_ids(ids, vocab_size)
    except PromptError as error:
        raise PromptError(f"continuation {shown(continuation)}: {error}", field="continuations") from None


def loglikelihood_of(output: RequestOutput, length: int) -> LoglikelihoodOutput:
    """Returns the log-probability of the last `length` tokens of a finished request's prompt."""
    token_ids = output.prompt_token_ids[-length:]
    rows = (output.prompt_logprobs or [])[-length:]
    entries = [(row or {})[token] for token, row in zip(token_ids, rows, strict=True)]
    logprobs = [entry.logprob for entry in entries]
    return LoglikelihoodOutput(sum(logprobs), logprobs, token_ids, all(entry.rank == 1 for entry in entries))
