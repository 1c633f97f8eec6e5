"""Interface of adapters: `load(job)` returns a model that runs one measurement at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Job:
    """Model, format and directories of a child process."""

    model: Path
    """A Hugging Face directory in bf16, which the adapter converts to what its library reads, or a GGUF file."""
    work: Path
    """Directory of conversions, kept for the next run."""
    format: str
    """Weight format, by the peer's name; "auto" for those of a GGUF file."""
    kv: str | None
    """Format of the key-value cache, by the peer's own name; None for the peer's default."""
    threads: int
    context: int
    """Maximum length of a sequence in tokens, prompt and output together."""
    batch: int
    """Number of concurrent sequences."""


@dataclass(frozen=True)
class Loaded:
    """Version and sizes of a loaded model."""

    version: str
    """Version of the library and its build options."""
    total_bytes: int
    """Bytes of all weights, embedding and lm_head included."""
    token_bytes: int
    """Bytes of the weights that each token reads: all except an embedding that is not also lm_head."""
    kv_bytes_per_token: int
    """Bytes of keys and values per token."""


@dataclass(frozen=True)
class Timing:
    """One measurement."""

    prefill_seconds: float
    """Seconds from the prompts until each sequence has its first token."""
    decode_seconds: float
    """Seconds from the first tokens to the end."""
    decode_tokens: int
    """Number of tokens of all sequences after the first of each."""


class Runner(Protocol):
    """A loaded model."""

    @property
    def loaded(self) -> Loaded:
        """Version and sizes of the model."""
        ...

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Prefills `prompts` without cached prefixes, and greedily generates `gen` tokens after the first of each."""
        ...


def only(prompts: list[list[int]]) -> list[int]:
    """Returns the prompt for an adapter that measures one sequence at a time. Raises ValueError for several prompts."""
    if len(prompts) != 1:
        raise ValueError(f"this adapter measures one sequence at a time, not {len(prompts)}")
    return prompts[0]
