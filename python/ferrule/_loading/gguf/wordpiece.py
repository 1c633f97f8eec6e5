"""WordPiece (Schuster and Nakajima 2012) of BERT: longest-match-first tokenization of words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrule._loading.gguf.vocabulary import TOKENS, TokenType, Vocabulary
from ferrule.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGINS = "▁"
"""Prefix of tokens that begin a word. BERT's original vocabulary marks the other tokens instead."""
CONTINUES = "##"


def wordpiece(vocabulary: Vocabulary, unknown: str | None) -> Tokenizer:
    """Builds the tokenizer of a file whose `tokenizer.ggml.model` is bert.

    Raises TokenizerError.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    metadata = vocabulary.metadata
    if unknown is None:
        raise TokenizerError(
            f"{metadata.file}: {TOKENS} has no unknown token, which stands for words outside the vocabulary"
        )
    texts = spelled(vocabulary)
    ids = {text: token_id for token_id, text in enumerate(texts)}
    if len(ids) < len(texts):
        index = next(index for index, text in enumerate(texts) if ids[text] != index)
        raise vocabulary.fault(f"{TOKENS}[{index}]", vocabulary.tokens[index], "different from all others")
    backend = Tokenizer(models.WordPiece(ids, unk_token=unknown, continuing_subword_prefix=CONTINUES))
    lower = metadata.flag("tokenizer.ggml.normalizer.lowercase", default=True)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=metadata.flag("tokenizer.ggml.normalizer.strip_accents", default=lower)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUES)
    return backend


def spelled(vocabulary: Vocabulary) -> list[str]:
    """Returns the tokens in BERT's original spelling."""

    def spell(token: str, kind: int) -> str:
        if kind not in (TokenType.NORMAL, TokenType.UNDEFINED) or (token.startswith("[") and token.endswith("]")):
            return token
        return token.removeprefix(BEGINS) if token.startswith(BEGINS) else CONTINUES + token

    return [spell(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]
