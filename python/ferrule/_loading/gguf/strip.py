"""White space that special tokens strip beside them; a GGUF does not state it, so it follows from the model."""

from __future__ import annotations

import re

from ferrule._loading.gguf.vocabulary import Vocabulary

LEFT_BY_TOKENIZER = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
LEFT_BY_ARCHITECTURE = ("nomic-bert-moe", "jina-bert-v3")
_PHI3 = re.compile(r"phi[ -]?3", re.IGNORECASE)
_MODERN_BERT = re.compile(r"modern[ -]?bert", re.IGNORECASE)
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def left_stripped(vocabulary: Vocabulary) -> frozenset[str]:
    """Returns the tokens that strip the white space before them: the mask token of some encoders."""
    metadata = vocabulary.metadata
    if metadata.text("tokenizer.ggml.pre", default="") in LEFT_BY_TOKENIZER:
        return frozenset({"<mask>"})
    if metadata.text("general.architecture", default="") in LEFT_BY_ARCHITECTURE:
        return frozenset({"<mask>"})
    if _MODERN_BERT.search(metadata.text("general.name", default="")):
        return frozenset({"[MASK]"})
    return frozenset()


def right_stripped(vocabulary: Vocabulary, special: frozenset[str]) -> frozenset[str]:
    """Returns the tokens, among the special ones, that strip the white space after them: Phi-3's and Phi-3.5's.

    Phi-4 shares the architecture but has another tokenizer, without stripping.
    """
    metadata = vocabulary.metadata
    if metadata.text("tokenizer.ggml.model") != "llama":
        return frozenset()
    named = _PHI3.search(metadata.text("general.name", default="")) is not None
    if not named and metadata.text("general.architecture", default="") != "phi3":
        return frozenset()
    return special - _PHI3_PLAIN
