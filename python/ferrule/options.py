"""What an LLM is made with, checked and handed to the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from ferrule.checks import check_number, check_whole, shown
from ferrule.errors import InvalidParameterError
from ferrule.params import MAX_COUNT
from ferrule.speculative import SpeculativeConfig

QUANTIZATIONS = ("auto", "f32", "bf16", "f16", "int8", "int4")
"""Formats of the weights; auto is int8, or as stored where weights are quantized already. int4 keeps the embedding, the
head and a few sensitive matrices in six bits."""
KV_CACHE_DTYPES = ("auto", "f32", "f16", "bf16", "int8")
"""Formats of the key-value cache; auto is f32 beside f32 weights, else f16."""
LOAD_FORMATS = ("auto", "dummy")
MAX_THREADS = 1024
LONGEST_STEP = 3600.0
"""Seconds: limit of `target_itl`."""


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
    enable_prefix_caching: bool = True
    """Whether prompts that begin alike are computed once; it never changes a token."""
    prefix_cache_dir: str | os.PathLike[str] | None = None
    """A directory in which prefixes outlive the process; None keeps them in memory alone."""
    prefix_cache_dir_limit: int | None = None
    """Bytes that the directory may hold; None: 8 GiB."""
    max_queued_requests: int | None = None
    """Requests that may wait to be scheduled; None: any number."""
    target_itl: float | None = None
    """Seconds that a step may take in which prompts are read beside sequences that decode; None: 0.15.

    Where nobody waits for each of their tokens, as in `LLM.generate`, it is 0.4 if this is less.
    """
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    """What tokens to come are guessed by, and verified several at once; it never changes a token."""

    def __post_init__(self) -> None:
        _check_one_of("quantization", self.quantization, QUANTIZATIONS)
        _check_one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        object.__setattr__(self, "speculative_config", SpeculativeConfig.read(self.speculative_config))
        limits = {
            "threads": MAX_THREADS,
            "max_model_len": MAX_COUNT,
            "kv_cache_memory": 2**63 - 1,
            "max_num_seqs": MAX_COUNT,
            "max_num_batched_tokens": MAX_COUNT,
            "prefix_cache_dir_limit": 2**63 - 1,
            "max_queued_requests": MAX_COUNT,
        }
        for name, limit in limits.items():
            value: int | None = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_whole(name, value, 1, limit))
        if not isinstance(cast("object", self.enable_prefix_caching), bool):
            found = shown(self.enable_prefix_caching)
            raise InvalidParameterError(f"enable_prefix_caching is {found}; it must be True or False")
        object.__setattr__(self, "prefix_cache_dir", _checked_directory(self.prefix_cache_dir))
        for name in ("prefix_cache_dir", "prefix_cache_dir_limit"):
            needed = "enable_prefix_caching" if name == "prefix_cache_dir" else "prefix_cache_dir"
            if getattr(self, name) is not None and not getattr(self, needed):
                raise InvalidParameterError(
                    f"{name} is {shown(getattr(self, name))}; it needs {needed}, which is {getattr(self, needed)}"
                )
        if self.target_itl is not None:
            seconds = check_number("target_itl", self.target_itl, 0, LONGEST_STEP, above_low=True)
            object.__setattr__(self, "target_itl", seconds)

    def to_json(self) -> str:
        """As the native module reads it."""
        speculative = self.speculative
        return json.dumps(
            {**asdict(self), "speculative_config": None if speculative is None else speculative.engine_options()}
        )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The `speculative_config`, read."""
        return cast("SpeculativeConfig | None", self.speculative_config)

    def of_draft_model(self, quantization: str) -> EngineOptions:
        """The options of a model that guesses beside the one of these options."""
        return replace(self, quantization=quantization, speculative_config=None)


def check_load_format(load_format: object) -> None:
    """Where weights come from: the model's files, or nowhere.

    Raises InvalidParameterError.
    """
    _check_one_of("load_format", load_format, LOAD_FORMATS)


def _checked_directory(directory: object) -> str | None:
    if directory is None:
        return None
    path: object = os.fspath(cast("os.PathLike[str]", directory)) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidParameterError(
            f"prefix_cache_dir is {shown(cast('object', directory))}; it must be the path of a directory"
        )
    return os.path.expanduser(path)  # noqa: PTH111  # Path.expanduser raises where a home is unknown


def _check_one_of(field: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise InvalidParameterError(f"{field} is {shown(value)}; it must be one of {', '.join(names)}")
