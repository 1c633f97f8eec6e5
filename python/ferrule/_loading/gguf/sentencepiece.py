"""SentencePiece's BPE (Kudo and Richardson 2018) of Llama 1 and 2, Mistral and Gemma.

Adjacent pieces whose concatenation is in the vocabulary are merged, highest score first. The file has no list of
merges, so it is derived from the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrule._loading.gguf.vocabulary import TOKENS, TokenType, Vocabulary
from ferrule.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
PIECES = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNDEFINED)
"""Types of tokens that match text; byte tokens encode all other characters."""


def sentencepiece(vocabulary: Vocabulary, unknown: str | None) -> Tokenizer:
    """Builds the tokenizer of a file whose `tokenizer.ggml.model` is llama.

    Raises TokenizerError.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = vocabulary.tokens
    bytes_of = vocabulary.of_type(TokenType.BYTE)
    for token_id in bytes_of:
        if tokens[token_id] not in _BYTES:
            raise vocabulary.fault(f"{TOKENS}[{token_id}]", tokens[token_id], "of the form <0x00>, as it is a byte")
    if unknown is None and len(bytes_of) < len(_BYTES):
        raise TokenizerError(
            f"{vocabulary.metadata.file}: {TOKENS} must have all 256 bytes or an unknown token, got {len(bytes_of)} "
            "bytes; without them some texts cannot be tokenized"
        )
    model = models.BPE(
        vocabulary.ids, merges_of(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=bool(bytes_of)
    )
    backend = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    first = vocabulary.metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if first else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if first else steps)
    return backend


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns all pairs that concatenate to a piece, highest score first, as transformers derives them."""
    ids, tokens, scores = vocabulary.ids, vocabulary.tokens, vocabulary.scores()
    pieces = {tokens[token_id] for token_id in vocabulary.of_type(*PIECES)}
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for piece in pieces:
        score = scores[ids[piece]]
        for cut in range(1, len(piece)):
            first, second = piece[:cut], piece[cut:]
            if first in pieces and second in pieces:
                found.append((-score, -cut, cut - len(piece), ids[first], ids[second], first, second))
    found.sort()
    return [(first, second) for *_, first, second in found]


_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
