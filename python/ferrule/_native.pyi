"""The extension module: the engine in Rust. Speaks token ids and JSON; text lives above, in Python."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ferrule._params.logits_processors import LogitsProcessors

version: str
"""The version of the crates."""
layout_version: int
"""Names how packed weights lie in files."""
arithmetic_version: int
"""Names the bits that kernels give."""

class Engine:
    """A model with its weights, its key-value cache, its threads and its scheduler."""

    def __init__(
        self,
        spec: str,
        weights: str | None,
        options: str,
        progress: Callable[[int, int], None] | None = None,
        draft: tuple[str, str | None, str] | None = None,
    ) -> None:
        """Packs the weights of a checkpoint or a GGUF file, or random ones where there is none; or maps a packed file.

        `spec` is the JSON of a ModelSpec, `options` that of the load's options (quantization, mmap, which is off where
        a packed file is to be read into memory, allow_paging, threads, max_model_len,
        kv_cache_dtype, kv_cache_memory in bytes, max_num_seqs, max_num_batched_tokens, enable_prefix_caching,
        prefix_cache_dir, prefix_cache_dir_limit in bytes, max_queued_requests, target_itl in seconds,
        speculative_config). `progress` is called with the bytes packed so far and the bytes in all. `draft` is spec,
        weights and options of a smaller model of the same vocabulary, which guesses for it.

        Raises ModelFileError, ConfigError, InvalidParameterError, InsufficientMemoryError, KeyboardInterrupt.
        """

    def load_lora(self, directory: str, config: str) -> LoraAdapter:
        """Packs the tensors of an adapter that PEFT saved; `config` is the JSON of an AdapterConfig.

        Waits for a running step, and then goes on beside others.

        Raises ModelFileError, ConfigError, UnsupportedModelError, InsufficientMemoryError, EngineError,
        KeyboardInterrupt.
        """

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: str,
        fork_of: int | None = None,
        lora: LoraAdapter | None = None,
        logits_processors: LogitsProcessors | None = None,
        grammar: Grammar | None = None,
    ) -> int:
        """Queues a request and returns its id; `params` is the JSON of its sampling parameters.

        `fork_of` names an earlier request with the same prompt and adapter: the new one waits until that is computed
        and shares its pages. `lora` is one of this engine's adapters, which the request keeps to its end.
        `logits_processors` is called, within `step`, before each token is sampled. `grammar` is what the output must
        be, compiled for a vocabulary of the model's size.

        Raises PromptError, InvalidParameterError, QueueFullError, EngineError.
        """

    def step(self) -> list[StepOutput]:
        """One batched forward pass and a sample for each sequence that is due; Python's lock is released.

        Raises EngineError where the engine is dead, KeyboardInterrupt within 200 ms of Ctrl-C. After an interrupt the
        engine is as before the step.
        """

    def abort(self, request_id: int) -> bool:
        """Ends a request at once and frees its pages; says whether it was still running."""

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""

    def logits(self, token_ids: list[int], lora: LoraAdapter | None = None, first: int = 0) -> bytearray:
        """The logits after each token from the one at `first` on: float32 `[len(token_ids) - first, vocab_size]`.

        Raises PromptError, EngineError, KeyboardInterrupt.
        """

    def encode(self, texts: list[tuple[list[int], list[int], str | None]], task: str) -> bytearray:
        """What a task makes of texts: float32, one text's numbers after the other's.

        A text is its token ids, their kinds (empty where all are of the first) and its cache salt. `task` is JSON:
        `{"type": "embedding", "pooling": "mean", "normalize": true, "dimensions": null}` (pooling `cls`, `mean` or
        `last`; `[dimensions]` each), `{"type": "token_embeddings", "normalize": false}` (`[tokens, hidden_size]`),
        `{"type": "scores"}` (`[labels]`), `{"type": "logits", "tokens": [1, 2]}` (of these tokens, after the text) or
        `{"type": "top_logprobs", "count": 8}` (`[tokens, 2, count]`: ids, as bits, and log-probabilities of the
        likeliest tokens after each).

        Raises PromptError, InvalidParameterError, UnsupportedTaskError, InsufficientMemoryError, EngineError,
        KeyboardInterrupt.
        """

    def save_state(self, token_ids: list[int], cache_salt: str | None, lora: LoraAdapter | None = None) -> bytes:
        """The keys and values of a prompt; what the prefix cache lacks of them is computed.

        Raises PromptError, EngineError, KeyboardInterrupt.
        """

    def restore_state(self, state: bytes) -> tuple[list[int], int]:
        """Puts a saved state into the prefix cache: its tokens, and how many of them the cache has now.

        Raises InvalidParameterError for bytes that are no state of this model, and where prefix caching is off.
        """

    def metrics(self) -> str:
        """Counters, gauges and histograms since the engine began, as JSON; never waits for a running step."""

    def close(self) -> None:
        """Frees everything; later calls raise EngineError."""

    def info(self) -> str:
        """What is loaded and how, as JSON."""

class GgufFile:
    """A model's GGUF file, or all of its parts. Its headers are read and checked when it is opened."""

    def __init__(self, path: str) -> None:
        """Opens a file; of a model in several (`-00001-of-00003.gguf`), any one, and with it the others beside it.

        Raises ModelFileError.
        """

    @property
    def parts(self) -> list[Path]:
        """The files, in their order."""
    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the first file, read anew each time: int, float, bool, str, and lists of one of these.

        Raises ModelFileError where the file has been changed since it was opened.
        """
    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The type of each tensor, as ggml names it, and its shape, row-major: the slowest dimension first."""

    def dequantize(self, name: str) -> bytearray:
        """The numbers of a tensor: float32 of its shape, row-major.

        Raises ModelFileError where there is no such tensor, and of integers and doubles, which are no weights.
        """

class LoraAdapter:
    """A low-rank adapter of one engine; alive as long as this or a request that has it."""

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""
    @property
    def modules(self) -> list[str]:
        """The base's modules that it changes, sorted."""
    @property
    def bytes(self) -> int:
        """Of its packed matrices."""

class Vocabulary:
    """The bytes of a model's tokens, for which grammars are compiled."""

    def __init__(self, tokens: list[bytes], special: set[int]) -> None:
        """Takes the bytes of each id, none for one that stands for nothing; `special` ones are marks and no text.

        Takes about half a second for a hundred thousand tokens. Raises TokenizerError.
        """

    def compile(self, asked: str) -> Grammar:
        """Compiles what a request asks for, or takes it from among the latest that were.

        `asked` is JSON: `{"type": "json", "schema": "...", "whitespace": "some"}` (or `"none"`, or
        `{"pattern": "..."}`), `{"type": "regex", "pattern": "..."}`, `{"type": "choice", "choices": [...]}`,
        `{"type": "grammar", "grammar": "..."}` (Lark) or `{"type": "structural_tag", "tag": "..."}`.

        Raises InvalidParameterError, within seconds.
        """

class Grammar:
    """What the output of a request must be, compiled for a vocabulary."""

class Beam:
    """A sequence that a beam search has found."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def cumulative_logprob(self) -> float: ...
    @property
    def score(self) -> float:
        """`cumulative_logprob` over the number of tokens to the power of the length penalty."""
    @property
    def stop_token(self) -> int | None:
        """The token that ended it, where one did."""

class StepOutput:
    """What one request got in a step."""

    @property
    def request_id(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `abort`, `error`, or None while the request goes on."""
    @property
    def stop_token(self) -> int | None:
        """The token that ended the request, where one did."""
    @property
    def error(self) -> str | None: ...
    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One for each token, where they were asked for."""
    @property
    def entropies(self) -> list[float]:
        """Of the raw logits, in nats, one for each token, where they were asked for."""
    @property
    def trace(self) -> list[SampleTrace]:
        """One for each token, where they were asked for."""
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of successive tokens of the prompt from prompt_logprobs_from, in this step and before the first token."""
    @property
    def beams(self) -> list[Beam]:
        """What a beam search has found, the best first, with its end. It has no tokens else."""
    @property
    def queued_seconds(self) -> float | None:
        """From arrival until first scheduled."""
    @property
    def first_token_seconds(self) -> float | None:
        """From arrival."""
    @property
    def last_token_seconds(self) -> float | None:
        """From arrival."""
    @property
    def preemptions(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had, or another request with the same prompt."""
    @property
    def drafted_tokens(self) -> int:
        """Tokens that were guessed so far."""
    @property
    def accepted_tokens(self) -> int:
        """Of these, those that came indeed."""

class TokenLogprobs:
    """Log-probabilities, before any sampler stage, of a sampled token and of the likeliest ones."""

    @property
    def sampled(self) -> tuple[int, float, int]:
        """Token, log-probability, rank from 1."""
    @property
    def top(self) -> list[tuple[int, float, int]]: ...

class SampleTrace:
    """How one token was chosen."""

    @property
    def candidates(self) -> list[Candidate]: ...
    @property
    def stages(self) -> list[tuple[str, int, float]]:
        """The active sampler stages in their order: name, tokens left, the entropy of these in nats."""
    @property
    def draw(self) -> float | None:
        """The uniform random number, or None where the choice was greedy."""
    @property
    def chosen(self) -> int: ...

class Candidate:
    """A token that might have been chosen."""

    @property
    def id(self) -> int: ...
    @property
    def logit(self) -> float: ...
    @property
    def probability(self) -> float:
        """Of the raw logits."""
    @property
    def stage_probabilities(self) -> list[float]:
        """After each stage of the trace."""
    @property
    def final_probability(self) -> float:
        """After all sampler stages."""
    @property
    def dropped_by(self) -> str | None:
        """The sampler stage that dropped it."""

class ParameterRow:
    """A row of a parameter table: name, type, default and bounds."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str:
        """`float`, `int`, `bool`, `str`, `choice`, `token_ids`, `token_sequences`, `token_bias` or `object`."""
    @property
    def default(self) -> Any:
        """Default value; None where there is none."""
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
        """Largest number of items of a list."""
    @property
    def choices(self) -> list[str]:
        """Names to choose from."""
    @property
    def requirement(self) -> str:
        """What the value must be, as it reads after "must be"."""
    @property
    def doc(self) -> str:
        """One sentence that says what the parameter does."""

class Ceilings:
    """Probes of what the machine can give, on as many threads as a model uses or on one alone."""

    def __init__(self, threads: int) -> None:
        """Takes memory to read: half a gigabyte or twice the last cache, at most a quarter of what is free.

        Raises InvalidParameterError, InsufficientMemoryError.
        """

    @property
    def read_bytes(self) -> int:
        """Bytes of memory that a pass reads."""

    def measure(self, *, alone: bool = False) -> tuple[float, float, float, float]:
        """One pass: bytes read, int8 operations, f32 operations, integer additions per second.

        Takes a fraction of a second; the first one a few, to find how the memory is read fastest. Raises
        KeyboardInterrupt.
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
    """What the sampler makes of a row of logits: the tokens kept, their probabilities, and the one chosen."""

def pack(
    spec: str,
    weights: str | None,
    options: str,
    path: str,
    metadata: dict[str, str],
    calibration: list[list[int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Packs the weights of a checkpoint's directory or of a GGUF file, or random ones, into the file `path`.

    With `calibration`, sequences of tokens, integer formats make their errors where they cost least as the model runs
    over them.

    `spec`, `options` and `progress` are those of an Engine; `metadata` is written beside what the file itself needs.
    The file appears whole or not at all; one that was there stays until then.

    Raises ModelWriteError where it cannot be written; ModelFileError, ConfigError, InvalidParameterError,
    InsufficientMemoryError, KeyboardInterrupt.
    """

def packed_metadata(path: str) -> tuple[str, int]:
    """The metadata of a packed file, as JSON, and the bytes of its tensors; reads the header alone.

    Raises ModelFileError for what is no packed file of this version.
    """

def measure(spec: str, weights: str | None, options: str) -> str:
    """What an Engine of these arguments would be and what it would take of memory, as JSON.

    Of the checkpoint or the packed file the headers are read; without one the spec alone says what weights come to.

    Raises ModelFileError, ConfigError, InvalidParameterError.
    """

def isa() -> str:
    """The instruction set in use: the fastest that this machine has, or what FERRULE_ISA names."""

def isa_names() -> list[str]:
    """Every instruction set that this build knows, slowest first."""

def available_isas() -> list[str]:
    """Those that this machine has, slowest first."""

def cpu_count() -> int:
    """Processors that this process may use, by affinity and by the container's quota."""

def available_memory() -> int:
    """Bytes that this process may still allocate, by the machine and by the container's limit."""
