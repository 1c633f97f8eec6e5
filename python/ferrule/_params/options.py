"""`EngineArgs`: the arguments of `LLM` and `AsyncLLM`, under vLLM's names where vLLM has them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self, cast

from ferrule._params.compatibility import compatible
from ferrule._params.declaration import Choice, Doc, Flag, Integer, Number, check_bounds
from ferrule._params.foreign_engine_args import FOREIGN
from ferrule._params.sampling import MAX_COUNT
from ferrule._params.speculative import SpeculativeConfig
from ferrule.errors import InvalidParameterError

QUANTIZATIONS = ("auto", "f32", "bf16", "f16", "int8", "int4")
"""Weight formats. `auto` is int8, bf16 for encoders, or the stored format of a quantized checkpoint. `int4` keeps the
embedding, the lm_head and a few sensitive matrices in six bits."""
STORED_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "bitsandbytes", "mxfp4", "gguf")
"""Methods of quantized checkpoints that vLLM's programs pass as `quantization`; they have the effect of `auto`."""
KV_CACHE_DTYPES = ("auto", "f32", "f16", "bf16", "int8")
"""Formats of the KV cache; `auto` is f32 with f32 weights, else f16."""
NUMA = ("auto", "off")
"""Placement of threads and weights on NUMA nodes."""
LOAD_FORMATS = ("auto", "dummy")
"""Sources of the weights: the model's files, or random numbers."""
MAX_THREADS = 1024
MAX_BYTES = 2**63 - 1
PYTHON_OPTIONS = ("packed_cache_limit", "verify_weights")
"""Options that Python handles and the native module does not read."""
EXECUTOR_BACKENDS = ("mp", "ray", "uni")
"""Allowed values of `distributed_executor_backend`."""
MAX_STAGES = 1024
LONGEST_STEP = 3600.0
"""Limit of `target_itl`, in seconds."""
MAX_QUEUED_REQUESTS = 1024
"""Default of `max_queued_requests` in `AsyncLLM`."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine, which chooses the value of an option that is None.

    Raises InvalidParameterError for an invalid value.
    """

    quantization: Annotated[
        str,
        Choice(QUANTIZATIONS),
        Doc(
            "Weight format. `auto` is int8, bf16 for encoders, or the stored format of a quantized checkpoint; int4 "
            "keeps the embedding, the lm_head and a few sensitive matrices in six bits. The method of a "
            "quantized checkpoint, such as awq, means `auto`."
        ),
    ] = "auto"
    mmap: Annotated[
        bool,
        Flag(),
        Doc(
            "Whether to map the packed file, so that processes share its memory, or to read it into memory of this "
            "process. A program that truncates a mapped file ends this process."
        ),
    ] = True
    allow_paging: Annotated[
        bool, Flag(), Doc("Whether to load weights that exceed the memory; they are mapped and read again when needed.")
    ] = False
    packed_cache_limit: Annotated[
        int | None,
        Integer(0, MAX_BYTES),
        Doc(
            "Limit of the packed file cache, in bytes; 0 keeps no files. None: $FERRULE_PACKED_CACHE_LIMIT, or 100 GiB."
        ),
    ] = None
    verify_weights: Annotated[
        bool,
        Flag(),
        Doc(
            "Whether to compare the checksums of a packed file before the first token. Otherwise they are compared in "
            "the background, and damage ends the engine with an EngineError. A verified file is not verified again "
            "before the next boot."
        ),
    ] = False
    threads: Annotated[
        int | None,
        Integer(1, MAX_THREADS),
        Doc("Number of threads. None: the number of CPUs that affinity and the container's quota allow."),
    ] = None
    numa: Annotated[
        str,
        Choice(NUMA),
        Doc(
            "Placement on machines with several NUMA nodes: `auto` divides the threads among the nodes and keeps each "
            "on its node, with the weights that it reads; `off` leaves both to the system."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Integer(1, MAX_COUNT),
        Doc("Maximum length of a sequence in tokens, prompt and output together. None: the model's context length."),
    ] = None
    kv_cache_dtype: Annotated[
        str, Choice(KV_CACHE_DTYPES), Doc("Format of the KV cache; `auto` is f32 with f32 weights, else f16.")
    ] = "auto"
    kv_cache_memory: Annotated[int | None, Integer(1, MAX_BYTES), Doc("Memory of the KV cache, in bytes.")] = None
    max_num_seqs: Annotated[
        int | None,
        Integer(1, MAX_COUNT),
        Doc("Maximum number of sequences in a step. None: as many as fit into memory."),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Integer(1, MAX_COUNT),
        Doc("Maximum number of tokens in a step, which also limits a prefill chunk."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Flag(), Doc("Whether prompts share the KV cache of a common prefix; the output does not depend on it.")
    ] = True
    prefix_cache_dir: Annotated[
        str | os.PathLike[str] | None,
        Doc("Directory that keeps cached prefixes across processes. None: prefixes are kept in memory only."),
    ] = None
    prefix_cache_dir_limit: Annotated[
        int | None, Integer(1, MAX_BYTES), Doc("Limit of `prefix_cache_dir`, in bytes. None: 8 GiB.")
    ] = None
    max_queued_requests: Annotated[
        int | None,
        Integer(1, MAX_COUNT),
        Doc("Maximum number of waiting requests. None: no limit in LLM, 1024 in AsyncLLM."),
    ] = None
    target_itl: Annotated[
        float | None,
        Number(0, LONGEST_STEP, above_low=True),
        Doc(
            "Target time in seconds between two tokens of a decoding sequence while prompts are computed: one step, or "
            "with pipeline stages one step of each batch in flight. None: 0.15. If no request is streamed, as in "
            "LLM.generate and with `output_kind=FINAL_ONLY`, it is at least 0.4, and a batch of pipeline stages "
            "may have 128 prompt tokens even if the steps then take longer."
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | Mapping[str, Any] | None,
        Doc("Speculative decoding: a mapping with the fields of SpeculativeConfig; the output does not depend on it."),
    ] = None

    def __post_init__(self) -> None:
        if self.quantization in (None, *STORED_METHODS):  # values of programs for vLLM
            object.__setattr__(self, "quantization", "auto")
        check_bounds(self)
        object.__setattr__(self, "speculative_config", SpeculativeConfig.read(self.speculative_config))
        object.__setattr__(self, "prefix_cache_dir", _checked_directory(self.prefix_cache_dir))
        if self.allow_paging and not self.mmap:
            raise InvalidParameterError("allow_paging", True, "False with mmap=False")
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise InvalidParameterError(
                "prefix_cache_dir", self.prefix_cache_dir, "left out with enable_prefix_caching=False"
            )
        if self.prefix_cache_dir_limit is not None and self.prefix_cache_dir is None:
            raise InvalidParameterError(
                "prefix_cache_dir_limit", self.prefix_cache_dir_limit, "left out without prefix_cache_dir"
            )

    def to_json(self) -> str:
        """Returns the options that the native module reads, as JSON."""
        names = [each.name for each in fields(EngineOptions) if each.name not in PYTHON_OPTIONS]
        values: dict[str, object] = {name: getattr(self, name) for name in names}
        values["speculative_config"] = None if self.speculative is None else self.speculative.engine_options()
        return json.dumps(values)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The configuration of speculative decoding."""
        return cast("SpeculativeConfig | None", self.speculative_config)

    def for_draft_model(self, quantization: str) -> Self:
        """Returns the options for loading a draft model beside the model of these options."""
        return replace(self, quantization=quantization, speculative_config=None)

    def for_vision_tower(self) -> Self:
        """Returns the options for loading the vision tower of a model of these options.

        Its weights are int8 beside those of a format of integers. One tile of an image is computed at a time.
        """
        return replace(
            self,
            quantization="int8" if self.quantization in ("auto", "int8", "int4") else self.quantization,
            speculative_config=None,
            max_model_len=None,
            max_num_seqs=1,
            max_num_batched_tokens=None,
            kv_cache_dtype="auto",
            kv_cache_memory=None,
            enable_prefix_caching=False,
            prefix_cache_dir=None,
            prefix_cache_dir_limit=None,
        )

    def for_packed(self, packed: str | None, directory: Path) -> Self:
        """Returns the options for a directory whose weights are packed as `packed`; None means not packed.

        Raises InvalidParameterError if the options request another quantization.
        """
        if packed is None or self.quantization == packed:
            return self
        if self.quantization == "auto":
            return replace(self, quantization=packed)
        requirement = f"auto or {packed}, the format in which {directory} is packed"
        raise InvalidParameterError("quantization", self.quantization, requirement)


@compatible(FOREIGN)
@dataclass(frozen=True)
class EngineArgs(EngineOptions):
    """Arguments of `LLM`, as one object (vLLM's name).

        >>> from ferrule import EngineArgs
        >>> EngineArgs("org/model", max_model_len=4096).max_model_len
        4096

    Raises InvalidParameterError for an invalid value.
    """

    model: Annotated[
        str | os.PathLike[str] | None,
        Doc(
            "Model to load: a directory, a GGUF file, `org/repo` on the Hugging Face hub, or `org/repo:Q4_K_M` for a "
            "GGUF file with that quantization. None: the small model that ships with ferrule."
        ),
    ] = None
    _: KW_ONLY
    tokenizer: Annotated[
        str | os.PathLike[str] | None, Doc("Directory, file or repository of the tokenizer. None: the model's.")
    ] = None
    revision: Annotated[str | None, Doc("Branch, tag or commit of the model on the Hugging Face hub. None: main.")] = (
        None
    )
    load_format: Annotated[
        str, Choice(LOAD_FORMATS), Doc("`dummy` makes random weights instead of reading the model's files.")
    ] = "auto"
    seed: Annotated[
        int | None,
        Integer(0, 2**64 - 1),
        Doc("Seed that determines the seeds of requests which set none. None: a random seed."),
    ] = None
    lora_modules: Annotated[
        Mapping[str, str | os.PathLike[str]] | None, Doc("Low-rank adapters to load, by name and path.")
    ] = None
    pipeline_parallel_size: Annotated[
        int,
        Integer(1, MAX_STAGES),
        Doc(
            "Number of pipeline stages that divide the layers of the model; each has a worker: a process with its own "
            "weights and its part of the KV cache. `threads` is the number of threads of each worker; None: the CPUs "
            "divided by the workers. The output does not depend on it."
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int,
        Integer(1, MAX_STAGES),
        Doc(
            "Number of workers that divide the rows of the matrices of each pipeline stage. They compute each step "
            "together; `threads` is the number of threads of each worker. The output does not depend on it."
        ),
    ] = 1
    distributed_executor_backend: Annotated[
        str | None,
        Choice(EXECUTOR_BACKENDS),
        Doc(
            "Workers of pipeline and tensor parallelism: `mp` for processes of this machine, `ray` for actors of a Ray "
            "cluster. None: mp. A model in one process runs in this one (`uni`) with any value."
        ),
    ] = None
    progress: Annotated[
        Callable[[int, int], None] | None,
        Doc(
            "Function that is called with the number of bytes of weights loaded so far and in total. With pipeline "
            "stages, only while the weights are packed on this machine."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "tensor_parallel_size": self.tensor_parallel_size,
        }
        divided_by = " and ".join(name for name, size in sizes.items() if size > 1)
        if divided_by:
            if self.distributed_executor_backend == "uni":
                requirement = f"mp or ray with {divided_by} above 1"
                raise InvalidParameterError("distributed_executor_backend", "uni", requirement)
            draft_model = None if self.speculative is None else self.speculative.model
            unsupported = {
                "lora_modules": self.lora_modules,
                "prefix_cache_dir": self.prefix_cache_dir,
                "speculative_config.model": draft_model,
            }
            for name, value in unsupported.items():
                if value is not None:
                    raise InvalidParameterError(name, value, f"left out with {divided_by} above 1")

    @property
    def workers(self) -> int:
        """Number of workers of the model."""
        return worker_count(self.keywords())

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments by name, for a constructor."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def worker_count(options: Mapping[str, Any]) -> int:
    """Returns the number of workers of an engine with these arguments. A size that the engine refuses counts as 1."""
    sizes = [options.get(name, 1) for name in ("pipeline_parallel_size", "tensor_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


@compatible(FOREIGN)
@dataclass(frozen=True)
class AsyncEngineArgs(EngineArgs):
    """Arguments of `AsyncLLM`, as one object (vLLM's name).

    Raises InvalidParameterError for an invalid value.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_queued_requests is None:
            object.__setattr__(self, "max_queued_requests", MAX_QUEUED_REQUESTS)


def _checked_directory(directory: object) -> str | None:
    if directory is None:
        return None
    path: object = os.fspath(cast("os.PathLike[str]", directory)) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidParameterError("prefix_cache_dir", cast("object", directory), "the path of a directory")
    return os.path.expanduser(path)  # noqa: PTH111  # Path.expanduser raises where a home directory is unknown
