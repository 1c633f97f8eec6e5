"""SentencePiece's BPE (Kudo and Richardson 2018) of Llama 1 and 2, Mistral and Gemma.

Adjacent pieces whose concatenation is in the vocabulary are merged, highest score first. The file has no list of
merges, so `merges.py` derives it from the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrule._loading.gguf.merges import merges_of
from ferrule._loading.gguf.vocabulary import TOKENS, TokenType, Vocabulary
from ferrule.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"


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


_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
