"""How an embedding is made of hidden states, where a GGUF says so."""

from __future__ import annotations

from ferrule._loading.gguf.file import GgufFile
from ferrule.archs.spec import Pooling

POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


def gguf_pooling(file: GgufFile) -> Pooling | None:
    """The pooling of a model that is made for embeddings; None of one that says nothing.

    Raises ConfigError, UnsupportedModelError for a reranker, whose head ferrule does not read from a GGUF.
    """
    key = file.key("pooling_type")
    kind = file.metadata.whole(key, default=0, low=0)
    if kind and kind not in POOLINGS:
        raise file.metadata.unsupported(key, "0 (none), 1 (mean), 2 (first token) or 3 (last token)")
    return POOLINGS.get(kind)
