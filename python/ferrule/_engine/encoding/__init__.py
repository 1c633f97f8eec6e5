"""What is made of whole texts: embeddings, classes, ranks.

`texts` reads them, `plan` says what the engine computes of them and what that means, `judge` asks a decoder whether a
document answers a query, and `queue` feeds the engine beside its requests.
"""

from ferrule._engine.encoding.plan import Encoding, Plan

__all__ = ["Encoding", "Plan"]
