"""What an LLM is made with, checked and handed to the engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ferrule.checks import check_whole, shown
from ferrule.errors import InvalidParameterError
from ferrule.params import MAX_COUNT

QUANTIZATIONS = ("auto", "f32", "bf16", "f16", "int8", "int4")
"""Formats of the weights; auto is int8. int4 keeps the embedding, the head and a few sensitive matrices in six bits."""
KV_CACHE_DTYPES = ("auto", "f32", "f16", "bf16", "int8")
"""Formats of the key-value cache; auto is f32 beside f32 weights, else f16."""
MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine loads a model and how much it may use; None leaves the choice to the engine.

    Raises InvalidParameterError for a value outside its limits.
    """

    quantization: str = "auto"
    threads: int | None = None
    """None: the processors that this process may use, by affinity and by the container's quota."""
    max_model_len: int | None = None
    """Tokens of the longest sequence, prompt and output together."""
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | None = None
    """Bytes."""
    max_num_seqs: int | None = None
    """Sequences in a step."""
    max_num_batched_tokens: int | None = None
    """Tokens in a step, and so the chunk of a prefill."""

    def __post_init__(self) -> None:
        _check_one_of("quantization", self.quantization, QUANTIZATIONS)
        _check_one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        limits = {
            "threads": MAX_THREADS,
            "max_model_len": MAX_COUNT,
            "kv_cache_memory": 2**63 - 1,
            "max_num_seqs": MAX_COUNT,
            "max_num_batched_tokens": MAX_COUNT,
        }
        for name, limit in limits.items():
            value: int | None = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_whole(name, value, 1, limit))

    def to_json(self) -> str:
        """As the native module reads it."""
        return json.dumps(asdict(self))


def _check_one_of(field: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise InvalidParameterError(f"{field} is {shown(value)}; it must be one of {', '.join(names)}")
