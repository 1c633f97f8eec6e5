"""What an LLM is made with, checked and handed to the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ferrule._params.sampling import MAX_COUNT
from ferrule._params.speculative import SpeculativeConfig
from ferrule._validation import check_number, check_whole, shown
from ferrule.errors import InvalidParameterError

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
    mmap: bool = True
    """Whether a packed file is mapped, so that several processes share it, or read into memory of this one.

    Another program that truncates a mapped file ends this process.
    """
    allow_paging: bool = False
    """Whether weights may be more than memory holds: they are mapped, and read again and again."""
    packed_cache_limit: int | None = None
    """Bytes that packed files may take in the cache, 0 for none; None: $FERRULE_PACKED_CACHE_LIMIT or 100 GiB."""
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
        for name in ("enable_prefix_caching", "mmap", "allow_paging"):
            if not isinstance(cast("object", getattr(self, name)), bool):
                raise InvalidParameterError(f"{name} is {shown(getattr(self, name))}; it must be True or False")
        if self.packed_cache_limit is not None:
            limit = check_whole("packed_cache_limit", self.packed_cache_limit, 0, 2**63 - 1)
            object.__setattr__(self, "packed_cache_limit", limit)
        if self.allow_paging and not self.mmap:
            raise InvalidParameterError("allow_paging is True; it needs mmap, which is False")
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
        values = asdict(self)
        del values["packed_cache_limit"]  # Python's own business
        values["speculative_config"] = None if self.speculative is None else self.speculative.engine_options()
        return json.dumps(values)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The `speculative_config`, read."""
        return cast("SpeculativeConfig | None", self.speculative_config)

    def of_draft_model(self, quantization: str) -> EngineOptions:
        """The options of a model that guesses beside the one of these options."""
        return replace(self, quantization=quantization, speculative_config=None)

    def of_packed(self, packed: str | None, directory: Path) -> EngineOptions:
        """The options with which to load a directory whose weights are packed as `packed` already, if they are.

        Raises InvalidParameterError where they ask for another quantization.
        """
        if packed is None or self.quantization == packed:
            return self
        if self.quantization == "auto":
            return replace(self, quantization=packed)
        raise InvalidParameterError(
            f"quantization is {self.quantization!r}; {directory} is packed as {packed!r}: "
            f"it must be auto or {packed}, or the model the one that it was made from"
        )


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
