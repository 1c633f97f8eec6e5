"""What parameters that are text mean in a model's tokens."""

from __future__ import annotations

from ferrule._params.sampling import MAX_BAD_WORD_TOKENS, SamplingParams
from ferrule._text.tokenizer import Tokenizer
from ferrule.errors import InvalidParameterError


def bad_words_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """The sequences of tokens that must not come.

    A word is forbidden as a text begins with it, and as it follows a space where that is other tokens (as in vLLM).

    Raises InvalidParameterError, TokenizerError.
    """
    forbidden = dict.fromkeys(map(tuple, params.bad_words_ids))
    for index, word in enumerate(params.bad_words):
        for text in (word.lstrip() or word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidParameterError(
                    f"bad_words[{index}] has {len(ids)} tokens; the limit is {MAX_BAD_WORD_TOKENS}"
                )
            if ids:
                forbidden[tuple(ids)] = None
    return [list(ids) for ids in forbidden]


def breaker_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[int]:
    """The tokens across which DRY finds no repeats.

    They are those that contain a breaker, or else the last one of its own (as p-e-w has it); none without a tokenizer,
    or where DRY is off.

    Raises TokenizerError.
    """
    if not params.dry_multiplier or not tokenizer.available:
        return []
    found: set[int] = set()
    for breaker in params.dry_sequence_breakers:
        ids = tokenizer.ids_containing(breaker)
        found.update(ids or tokenizer.encode(breaker, add_special_tokens=False)[-1:])
    return sorted(found)
