"""Pooling: embeddings, classification, scoring and ranking of whole texts.

`texts` reads texts, `plan` makes the engine's task and the outputs, `judge` reranks with a decoder that answers yes or
no, and `queue` passes texts to the engine's thread.
"""

from ferrule._engine.encoding.plan import Encoding, Plan

__all__ = ["Encoding", "Plan"]
