"""SentencePiece's unigram model (Kudo 2018) of T5 and XLM-RoBERTa."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ferrule._loading.gguf.vocabulary import TokenType, Vocabulary, read_list

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS = "tokenizer.ggml.precompiled_charsmap"
"""Key of SentencePiece's compiled character normalization, as bytes."""
WHITESPACE = r"\s{2,}|[^\S ]"
"""White space that becomes one space: runs, and characters that the normalization keeps (U+0085).

The tokenizers of T5 and XLM-RoBERTa split texts at all white space.
"""


def unigram(vocabulary: Vocabulary, unknown: int | None) -> Tokenizer:
    """Builds the tokenizer of a file whose `tokenizer.ggml.model` is t5.

    Raises TokenizerError.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    from ferrule import _native

    metadata = vocabulary.metadata
    pieces = list(zip(vocabulary.tokens, map(float, vocabulary.scores()), strict=True))
    bytes_of = bool(vocabulary.of_type(TokenType.BYTE))
    backend = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=bytes_of))
    steps: list[normalizers.Normalizer] = []
    if CHARACTERS in metadata:
        numbers = read_list(metadata, CHARACTERS, "bytes")
        try:
            charsmap = bytes(cast("list[int]", [number & 0xFF for number in numbers]))
            _native.check_charsmap(charsmap)
            steps.append(normalizers.Precompiled(charsmap))
        except Exception as error:  # the library raises an error or panics on an invalid map
            raise vocabulary.fault(CHARACTERS, numbers, f"a map that SentencePiece compiled: {error}") from error
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", default=True):
        steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(WHITESPACE), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    first = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    scheme = "always" if first else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend
