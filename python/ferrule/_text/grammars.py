"""From what requests ask of their outputs to grammars over the tokens of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ferrule._native import Grammar, Vocabulary


class Grammars:
    """Compiles grammars; the vocabulary is made when the first one is asked for, since most programs need none."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None

    def compile(self, params: StructuredOutputsParams | None) -> Grammar | None:
        """The grammar of what is asked for, None where nothing is. Takes milliseconds, the first time some hundred.

        Raises InvalidParameterError for what cannot be followed, TokenizerError for a model whose tokens have no bytes
        of their own.
        """
        return None if params is None else self._require().compile(params.description())

    def _require(self) -> Vocabulary:
        # Two threads may make it at once: they make the same, and a lock would not survive a fork.
        if self._vocabulary is None:
            from ferrule import _native

            self._vocabulary = _native.Vocabulary(*self._tokenizer.token_bytes(self._vocab_size))
        return self._vocabulary
