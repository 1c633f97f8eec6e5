"""Special tokens that strip adjacent white space. GGUF files do not state this, so it is derived from the model."""

from __future__ import annotations

import re

from ferrule._loading.gguf.vocabulary import Vocabulary

LEFT_BY_TOKENIZER = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
LEFT_BY_ARCHITECTURE = ("nomic-bert-moe", "jina-bert-v3")
_PHI3 = re.compile(r"phi[ -]?3", re.IGNORECASE)
_MODERN_BERT = re.compile(r"modern[ -]?bert", re.IGNORECASE)
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def left_stripped(vocabulary: Vocabulary) -> frozenset[str]:
    """Returns the tokens that strip the white space before them, such as the mask token of some encoders."""
    metadata = vocabulary.metadata
    if metadata.text("tokenizer.ggml.pre", default="") in LEFT_BY_TOKENIZER:
        return frozenset({"<mask>"})
    if metadata.text("general.architecture", default="") in LEFT_BY_ARCHITECTURE:
        return frozenset({"<mask>"})
    if _MODERN_BERT.search(metadata.text("general.name", default="")):
        return frozenset({"[MASK]"})
    return frozenset()


def right_stripped(vocabulary: Vocabulary, special: frozenset[str]) -> frozenset[str]:
    """Returns the special tokens that strip the white space after them, as in Phi-3 and Phi-3.5.

    Phi-4 has the same architecture, but its tokenizer strips no white space.
    """
    metadata = vocabulary.metadata
    if metadata.text("tokenizer.ggml.model") != "llama":
        return frozenset()
    named = _PHI3.search(metadata.text("general.name", default="")) is not None
    if not named and metadata.text("general.architecture", default="") != "phi3":
        return frozenset()
    return special - _PHI3_PLAIN
