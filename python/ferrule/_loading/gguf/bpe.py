"""Byte-pair encoding with a list of merges: of bytes in GPT-2 and most later models, of characters in Gemma 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrule._loading.gguf.pre_tokenizers import pre_tokenization, splitter
from ferrule._loading.gguf.vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"


def byte_pair_encoding(vocabulary: Vocabulary, unknown: str | None) -> Tokenizer:
    """Builds the tokenizer of a file whose `tokenizer.ggml.model` is gpt2, gemma4 or whitespace.

    Raises TokenizerError, UnsupportedModelError.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    rules = pre_tokenization(vocabulary.metadata)
    # Padding tokens only fill rows of the embedding and must not match text.
    unused = set(vocabulary.of_type(TokenType.UNUSED))
    ids = {token: token_id for token, token_id in vocabulary.ids.items() if token_id not in unused}
    merges = vocabulary.merges(ids)
    if rules.byte_level:
        backend = Tokenizer(models.BPE(ids, merges, ignore_merges=rules.ignore_merges))
        backend.decoder = decoders.ByteLevel()
    else:
        fallback = bool(vocabulary.of_type(TokenType.BYTE))
        backend = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
        steps: list[decoders.Decoder] = [decoders.ByteFallback(), decoders.Fuse()]
        if rules.escape_spaces:
            backend.normalizer = normalizers.Replace(" ", SPACE)
            steps.insert(0, decoders.Replace(SPACE, " "))
        backend.decoder = decoders.Sequence(steps)
    backend.pre_tokenizer = splitter(rules)
    return backend
