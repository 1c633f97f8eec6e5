"""Byte-level BPE of GPT-2 and most later models: bytes of pre-tokenized pieces are merged by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrule._loading.gguf.pre_tokenizers import pre_tokenization, splitter
from ferrule._loading.gguf.vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Builds the tokenizer of a file whose `tokenizer.ggml.model` is gpt2.

    Raises TokenizerError, UnsupportedModelError.
    """
    from tokenizers import Tokenizer, decoders, models

    rules = pre_tokenization(vocabulary.metadata)
    # Padding tokens, which fill the embedding's rows, cannot occur in text.
    unused = set(vocabulary.of_type(TokenType.UNUSED))
    ids = {token: token_id for token, token_id in vocabulary.ids.items() if token_id not in unused}
    merges = vocabulary.merges(ids)
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=rules.ignore_merges))
    backend.pre_tokenizer = splitter(rules.patterns)
    backend.decoder = decoders.ByteLevel()
    return backend
