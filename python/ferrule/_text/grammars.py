"""Compiles structured output parameters to grammars over a model's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ferrule._native import Grammar, Vocabulary


class Grammars:
    """Compiler of grammars for one model. The vocabulary is built for the first grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None

    def compile(self, params: StructuredOutputsParams | None) -> Grammar | None:
        """Compiles a grammar; returns None without parameters.

        Takes milliseconds. The first call also builds the vocabulary, which takes 0.5 s for 100,000 tokens.

        Raises InvalidParameterError for an invalid or unsupported structure, TokenizerError for a model whose tokens do
        not map to bytes.
        """
        return None if params is None else self._require().compile(params.description())

    def _require(self) -> Vocabulary:
        # Two threads may build it at the same time with the same result. A lock could stay locked in a forked child.
        if self._vocabulary is None:
            from ferrule import _native

            self._vocabulary = _native.Vocabulary(*self._tokenizer.token_bytes(self._vocab_size))
        return self._vocabulary
