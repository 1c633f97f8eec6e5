"""Pooling of embedding models in GGUF files."""

from __future__ import annotations

from ferrule._loading.gguf.file import GgufFile
from ferrule.archs.spec import Pooling

POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


def gguf_pooling(file: GgufFile) -> Pooling | None:
    """Returns the pooling of an embedding model; None if the file does not state it.

    Raises ConfigError; UnsupportedModelError for a reranker, because classifiers in GGUF files are not supported.
    """
    key = file.key("pooling_type")
    kind = file.metadata.integer(key, default=0, low=0)
    if kind and kind not in POOLINGS:
        raise file.metadata.unsupported(key, "0 (none), 1 (mean), 2 (first token) or 3 (last token)")
    return POOLINGS.get(kind)
