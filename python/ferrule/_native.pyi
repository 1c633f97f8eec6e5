"""Extension module of the Rust engine. Its interface is token ids and JSON; text is handled in Python."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ferrule._params.logits_processors import LogitsProcessors

version: str
"""Version of the crates."""
layout_version: int
"""Version of the layout of packed weights in files."""
arithmetic_version: int
"""Version of the kernels' arithmetic: equal versions give equal bits."""

class Engine:
    """Engine: a model with its weights, KV cache, threads and scheduler."""

    def __init__(
        self,
        spec: str,
        weights: str | None,
        options: str,
        progress: Callable[[int, int], None] | None = None,
        draft: tuple[str, str | None, str] | None = None,
        stages: tuple[list[int], int] | None = None,
    ) -> None:
        """Loads a model: maps a packed file, or packs the weights of a checkpoint or GGUF file, or random weights.

        `spec` is the JSON of a ModelSpec, `options` the JSON of the options that `engine_options` lists. `progress` is
        called with the bytes packed so far and the bytes in total. `draft` is the spec, weights and options of a
        smaller draft model with the same vocabulary. With `stages`, the model runs in pipeline stages, first to last,
        instead of this process: sockets whose other ends run `serve_stage`, and the number of workers of each stage.
        Only headers of the weights are read then.

        Raises ModelFileError, ConfigError, InvalidParameterError, InsufficientMemoryError, PipelineStageError,
        KeyboardInterrupt.
        """

    def load_lora(self, directory: str, config: str) -> LoraAdapter:
        """Packs the tensors of an adapter that PEFT saved; `config` is the JSON of an AdapterConfig.

        Waits for a running step, then loads while other steps run.

        Raises ModelFileError, ConfigError, UnsupportedModelError, InsufficientMemoryError, EngineError,
        KeyboardInterrupt; UnsupportedTaskError for an engine with pipeline stages.
        """

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: str,
        fork_of: int | None = None,
        lora: LoraAdapter | None = None,
        logits_processors: LogitsProcessors | None = None,
        grammar: Grammar | None = None,
        features: list[tuple[int, int, bytes]] = ...,
    ) -> int:
        """Queues a request and returns its id; `params` is the JSON of its sampling parameters.

        `fork_of` is the id of an earlier request with the same prompt and adapter. The new request waits until that
        prompt has been computed and shares its pages. `lora` is an adapter of this engine, which the request keeps
        alive.
        `logits_processors` is called within `step` before each token is sampled. `grammar` constrains the output; it is
        compiled for a vocabulary of the model's size. `features` take the place of the embeddings of tokens: first
        position, number of tokens, and rows of float32.

        Raises PromptError, InvalidParameterError, QueueFullError, EngineError.
        """

    def step(self) -> list[StepOutput]:
        """Runs one batched forward pass and samples a token for each sequence that is due; releases the GIL.

        Raises EngineError if the engine is dead, KeyboardInterrupt within 200 ms of Ctrl-C. An interrupt leaves the
        state of the engine as it was before the step.
        """

    def abort(self, request_id: int) -> bool:
        """Aborts a request and frees its pages; returns whether it was still running."""

    def has_unfinished_requests(self) -> bool:
        """Returns whether a request is unfinished."""

    def logits(self, token_ids: list[int], lora: LoraAdapter | None = None, first: int = 0) -> bytearray:
        """Computes the logits after each token from `first` on: float32 `[len(token_ids) - first, vocab_size]`.

        Raises PromptError, EngineError, KeyboardInterrupt.
        """

    def encode(self, texts: list[tuple[list[int], list[int], str | None]], task: str) -> bytearray:
        """Encodes texts; returns the concatenated results of all texts as float32.

        A text is its token ids, token types (empty for all 0) and cache salt. `task` is JSON:
        `{"type": "embedding", "pooling": "mean", "normalize": true, "dimensions": null}` (pooling `cls`, `mean` or
        `last`; `[dimensions]` each), `{"type": "token_embeddings", "normalize": false}` (`[tokens, hidden_size]`),
        `{"type": "scores"}` (`[labels]`), `{"type": "logits", "tokens": [1, 2]}` (logits of these tokens, after the
        text) or `{"type": "top_logprobs", "count": 8}` (`[tokens, 2, count]`: ids, as bits, and log-probabilities of
        the most likely tokens after each token).

        Raises PromptError, InvalidParameterError, UnsupportedTaskError, InsufficientMemoryError, EngineError,
        KeyboardInterrupt.
        """

    def features(self, tiles: list[tuple[list[int], bytes]]) -> bytearray:
        """Computes the features of an image with a vision tower: float32 `[tokens, width]`, those of all tiles.

        A tile is the places of its patches in the table of positions, and the patches, float32 `[patches, values]`.

        Raises PromptError, EngineError, KeyboardInterrupt.
        """

    def save_state(self, token_ids: list[int], cache_salt: str | None, lora: LoraAdapter | None = None) -> bytes:
        """Returns the KV cache of a prompt as bytes; computes the part that the prefix cache does not have.

        Raises PromptError, EngineError, KeyboardInterrupt.
        """

    def restore_state(self, state: bytes) -> tuple[list[int], int]:
        """Restores a saved state into the prefix cache; returns its tokens and the number of them that are cached now.

        Raises InvalidParameterError for bytes that are not a state of this model, and if prefix caching is disabled.
        """

    def metrics(self) -> str:
        """Returns counters, gauges and histograms as JSON; does not wait for a running step."""

    def close(self) -> None:
        """Frees the model, the KV cache and the threads; later calls raise EngineError."""

    def info(self) -> str:
        """Returns facts about the model and the engine as JSON: sizes, formats and limits."""

class GgufFile:
    """GGUF model of one file or several. The constructor reads and checks the headers."""

    def __init__(self, path: str) -> None:
        """Opens a file and the other parts of its model (`-00001-of-00003.gguf`).

        Raises ModelFileError.
        """

    @property
    def parts(self) -> list[Path]:
        """Paths of the files, in order."""
    @property
    def metadata(self) -> dict[str, Any]:
        """Returns the metadata of the first file, which each call reads: int, float, bool, str, and lists of these.

        Raises ModelFileError if the file has changed since it was opened.
        """
    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the type of each tensor, by ggml's name, and its row-major shape (slowest dimension first)."""

    def dequantize(self, name: str) -> bytearray:
        """Returns a tensor as float32, row-major.

        Raises ModelFileError for an unknown tensor, and for types that are not weights (integers, doubles).
        """

class LoraAdapter:
    """LoRA adapter of one engine; it is freed when neither Python nor a request refers to it."""

    @property
    def rank(self) -> int:
        """Largest rank of the matrices."""
    @property
    def modules(self) -> list[str]:
        """Modules of the base model that the adapter changes, sorted."""
    @property
    def bytes(self) -> int:
        """Bytes of the packed matrices."""

class PackedFile:
    """A packed file whose header has been read. Tensors are read on demand."""

    def __init__(self, path: str) -> None:
        """Opens a file and reads its header.

        Raises ModelFileError for a file that is not a packed file of this version, or whose header is damaged.
        """

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata."""
    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
    @property
    def tensors(self) -> list[str]:
        """Names of the tensors in the order of the file."""
    def verify(self, index: int) -> None:
        """Reads the tensor at `index` of `tensors` and compares its checksum; other threads run meanwhile.

        Raises ModelFileError if the tensor is damaged or cannot be read, IndexError.
        """

class Vocabulary:
    """Bytes of a model's tokens, for which grammars are compiled."""

    def __init__(self, tokens: list[bytes], special: set[int]) -> None:
        """Takes the bytes of each token id, empty for an unused one; ids in `special` are special tokens.

        Takes about 0.5 s for 100,000 tokens.

        Raises TokenizerError.
        """

    def compile(self, spec: str) -> Grammar:
        """Compiles the grammar of a request, or takes it from the cache.

        `spec` is JSON: `{"type": "json", "schema": "...", "whitespace": "some"}` (or `"none"`, or
        `{"pattern": "..."}`), `{"type": "regex", "pattern": "..."}`, `{"type": "choice", "choices": [...]}`,
        `{"type": "grammar", "grammar": "..."}` (Lark) or `{"type": "structural_tag", "tag": "..."}`.

        Raises InvalidParameterError, also for a grammar that would take too long to compile.
        """

class Grammar:
    """Grammar of a request's output, compiled for a vocabulary."""

class Beam:
    """Sequence that a beam search found."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def cumulative_logprob(self) -> float: ...
    @property
    def score(self) -> float:
        """`cumulative_logprob` divided by the number of tokens to the power of the length penalty."""
    @property
    def stop_token(self) -> int | None:
        """Token that ended the sequence; None if it was not ended by a token."""

class StepOutput:
    """Output of one request in a step."""

    @property
    def request_id(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `abort`, `error`, or None while the request runs."""
    @property
    def stop_token(self) -> int | None:
        """Token that ended the request; None if it was not ended by a token."""
    @property
    def error(self) -> str | None: ...
    @property
    def lost_stage(self) -> int | None:
        """Index of the pipeline stage whose loss ended the request."""
    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of each token, if requested."""
    @property
    def entropies(self) -> list[float]:
        """Entropy of the raw logits before each token, in nats, if requested."""
    @property
    def trace(self) -> list[SampleTrace]:
        """Trace of each token, if requested."""
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of successive prompt tokens from `prompt_logprobs_from` on, if requested."""
    @property
    def beams(self) -> list[Beam]:
        """Sequences of a finished beam search, the best first; a beam search has no other tokens."""
    @property
    def queued_seconds(self) -> float | None:
        """Seconds from arrival until the request was first scheduled."""
    @property
    def last_prefill_seconds(self) -> float | None:
        """Seconds from arrival until the latest part of the prompt was computed."""
    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from arrival until the first token."""
    @property
    def last_token_seconds(self) -> float | None:
        """Seconds from arrival until the latest token."""
    @property
    def preemptions(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens taken from the prefix cache or from a request with the same prompt."""
    @property
    def processed_tokens(self) -> int:
        """Number of prompt tokens that are computed or reused so far; a preemption sets it back."""
    @property
    def drafted_tokens(self) -> int:
        """Number of draft tokens so far."""
    @property
    def accepted_tokens(self) -> int:
        """Number of draft tokens that were accepted."""

class TokenLogprobs:
    """Log-probabilities, before any sampler stage, of a sampled token and of the most likely tokens."""

    @property
    def sampled(self) -> tuple[int, float, int]:
        """Token id, log-probability and rank from 1."""
    @property
    def top(self) -> list[tuple[int, float, int]]: ...

class SampleTrace:
    """Trace of the selection of one token."""

    @property
    def candidates(self) -> list[Candidate]: ...
    @property
    def stages(self) -> list[tuple[str, int, float]]:
        """Active sampler stages in order: name, number of tokens kept, their entropy in nats."""
    @property
    def draw(self) -> float | None:
        """Uniform random number, or None for a greedy selection."""
    @property
    def chosen(self) -> int: ...

class Candidate:
    """Candidate of a trace."""

    @property
    def id(self) -> int: ...
    @property
    def logit(self) -> float: ...
    @property
    def probability(self) -> float:
        """Probability by the raw logits."""
    @property
    def stage_probabilities(self) -> list[float]:
        """Probability after each stage of the trace."""
    @property
    def final_probability(self) -> float:
        """Probability after all sampler stages."""
    @property
    def dropped_by(self) -> str | None:
        """Sampler stage that dropped the token."""

class ParameterRow:
    """A row of a parameter table: name, type, default and bounds."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str:
        """`float`, `int`, `bool`, `str`, `choice`, `token_ids`, `token_sequences`, `token_bias` or `object`."""
    @property
    def default(self) -> Any:
        """Default value; None if there is no default."""
    @property
    def required(self) -> bool:
        """Whether the parameter has no default."""
    @property
    def minimum(self) -> float | None: ...
    @property
    def maximum(self) -> float | None: ...
    @property
    def exclusive_minimum(self) -> bool:
        """Whether `minimum` itself is excluded."""
    @property
    def max_items(self) -> int | None:
        """Maximum number of items of a list."""
    @property
    def choices(self) -> list[str]:
        """Allowed names of a choice."""
    @property
    def requirement(self) -> str:
        """Requirement of the value, as it reads after "must be"."""
    @property
    def doc(self) -> str:
        """Documentation of the parameter in one sentence."""

class Ceilings:
    """Probes of the machine's memory bandwidth and operations per second, on a model's threads or on one."""

    def __init__(self, threads: int) -> None:
        """Allocates memory to read: 512 MiB or twice the last-level cache, at most a quarter of the free memory.

        Raises InvalidParameterError, InsufficientMemoryError.
        """

    @property
    def read_bytes(self) -> int:
        """Number of bytes that a pass reads."""

    def measure(self, *, alone: bool = False) -> tuple[float, float, float, float]:
        """Runs one pass; returns bytes read, int8 operations, f32 operations and integer additions per second.

        Takes a fraction of a second. The first pass takes some seconds, to find the fastest way to read the memory.

        Raises KeyboardInterrupt.
        """

def sampling_parameters() -> list[ParameterRow]:
    """Returns the sampling parameters that the engine reads."""

def beam_search_parameters() -> list[ParameterRow]:
    """Returns the parameters of a beam search that the engine reads."""

def engine_options() -> list[ParameterRow]:
    """Returns the options that the engine reads."""

def sample_distribution(
    logits: list[float], params: str, prompt: list[int], output: list[int]
) -> tuple[list[int], list[float], int]:
    """Samples from a row of logits; returns the tokens kept, their probabilities, and the sampled token."""

def pack(
    spec: str,
    weights: str | None,
    options: str,
    path: str,
    metadata: dict[str, str],
    calibration: list[list[int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    recipe: tuple[str, list[tuple[str, str]]] | None = None,
    pruning: tuple[str, str] | None = None,
    kept_layers: str | None = None,
) -> None:
    """Packs the weights of a checkpoint directory or a GGUF file, or random weights, into the file `path`.

    `calibration` is sequences of token ids over which the model runs, to reduce the error of integer formats (GPTQ).
    `recipe` is a name for errors, and patterns of tensor names with their formats, the last one of which counts.
    `pruning` is the sparsity of the layers, 2:4 or a share of zeros, and the method: magnitude, wanda or sparsegpt.
    `kept_layers` is a folder that keeps the layers that a calibration has finished: the same call continues after them.
    `spec`, `options` and `progress` are those of an Engine. `metadata` is written into the file in addition to its own
    metadata. The file is replaced atomically; a failure leaves an existing file unchanged.

    Raises ModelWriteError if the file cannot be written; ModelFileError, ConfigError, InvalidParameterError,
    InsufficientMemoryError, KeyboardInterrupt.
    """

def allocate_bits(
    spec: str,
    weights: str | None,
    options: str,
    bits: float,
    formats: list[str] | None = None,
    calibration: list[list[int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Chooses a format for each matrix, so that the estimated loss is least with at most `bits` per weight.

    `formats` are those to choose from; None for all.
    With `calibration`, sequences of token ids over which the model runs, the errors are those of calibrated matrices.
    Returns JSON: "matrices", each with "tensor", "format", "weights", "bytes", "error" and "loss"; and "bytes" and
    "weights" of all matrices, with those that are not quantized.

    Raises InvalidParameterError for unknown formats and for bits that they do not have; ModelFileError, ConfigError,
    InsufficientMemoryError, KeyboardInterrupt.
    """

def check_bits(spec: str, weights: str | None, options: str, bits: float, formats: list[str] | None = None) -> None:
    """Checks the `bits` and `formats` of `allocate_bits`. Reads only the headers of a checkpoint.

    Raises InvalidParameterError for unknown formats and for bits that they do not have; ModelFileError, ConfigError.
    """

def measure(spec: str, weights: str | None, options: str) -> str:
    """Returns the sizes and the memory requirements of an Engine with these arguments as JSON, without loading it.

    Reads only the headers of a checkpoint or a packed file; without weights, their size is computed from the spec.

    Raises ModelFileError, ConfigError, InvalidParameterError.
    """

def divide_layers(spec: str, weights: str | None, options: str, stages: int) -> list[tuple[int, int]]:
    """Divides the layers of a model into pipeline stages of about the same size; reads only headers.

    Returns the first layer of each stage and the one after its last.

    Raises ModelFileError, ConfigError, InvalidParameterError for a number of stages that the model does not allow.
    """

def check_workers_memory(spec: str, weights: str | None, options: str, workers: list[list[tuple[int, int]]]) -> None:
    """Checks that the memory of this machine holds the weights of these workers together; reads only headers.

    Each worker has three pairs: the first layer of its stage and the one after the last, the index of its stage and the
    number of stages, and its rank and the number of ranks.

    Raises ModelFileError, ConfigError, InvalidParameterError, InsufficientMemoryError.
    """

def serve_stage(
    spec: str,
    weights: str | None,
    options: str,
    layers: tuple[int, int],
    stage: tuple[int, int],
    rank: int,
    peers: list[int],
    sharers: int,
    socket: int,
) -> None:
    """Loads layers of a model and runs them for the Engine at the other end of a socket; releases the GIL.

    Returns when the engine closes the connection. `stage` is the index of the stage and the number of stages, among
    whose workers the rows of the embedding and the lm_head are divided. `peers` are sockets to the other workers that
    divide the rows of the stage's matrices, in the order of their ranks, and `rank` is the place of this worker among
    them. `sharers` workers, this one included, divide the memory of this machine. The sockets stay open.

    Raises the errors of Engine, and EngineError for a connection that is lost within a message.
    """

def check_tokenizer_json(content: bytes) -> None:
    """Checks the limits of a tokenizer.json before the tokenizers library parses it.

    Raises TokenizerError.
    """

def check_charsmap(charsmap: bytes) -> None:
    """Checks the header of SentencePiece's `precompiled_charsmap`.

    Raises TokenizerError.
    """

def isa() -> str:
    """Returns the instruction set in use: the one that FERRULE_ISA names, or the fastest one of the machine."""

def isa_names() -> list[str]:
    """Returns all instruction sets that this build supports, slowest first."""

def available_isas() -> list[str]:
    """Returns the instruction sets that this machine supports, slowest first."""

def cpu_count() -> int:
    """Returns the number of CPUs that the process may use, by affinity and the container's quota."""

def available_memory() -> int:
    """Returns the number of bytes that the process can still allocate on this machine and in its container."""
