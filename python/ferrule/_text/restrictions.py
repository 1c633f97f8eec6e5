"""Converts sampling parameters that are text to token ids."""

from __future__ import annotations

from ferrule._params.sampling import MAX_BAD_WORD_TOKENS, SamplingParams
from ferrule._text.tokenizer import Tokenizer
from ferrule.errors import InvalidParameterError


def bad_words_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the token sequences of `bad_words`.

    As in vLLM, a word is excluded at the beginning of a text, and after a space if its tokens differ there.

    Raises InvalidParameterError, TokenizerError.
    """
    forbidden = dict.fromkeys(map(tuple, params.bad_words_ids or ()))
    for index, word in enumerate(params.bad_words or ()):
        for text in (word.lstrip() or word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > MAX_BAD_WORD_TOKENS:
                requirement = f"a word of at most {MAX_BAD_WORD_TOKENS} tokens (it has {len(ids)})"
                raise InvalidParameterError(f"bad_words[{index}]", word, requirement)
            if ids:
                forbidden[tuple(ids)] = None
    return [list(ids) for ids in forbidden]


def breaker_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids of DRY's sequence breakers.

    For each breaker, these are the tokens that contain it, or else its last token, as in p-e-w's implementation. The
    list is empty without a tokenizer, or if DRY is disabled.

    Raises TokenizerError.
    """
    if not params.dry_multiplier or not tokenizer.available:
        return []
    found: set[int] = set()
    for breaker in params.dry_sequence_breakers:
        ids = tokenizer.ids_containing(breaker)
        found.update(ids or tokenizer.encode(breaker, add_special_tokens=False)[-1:])
    return sorted(found)
