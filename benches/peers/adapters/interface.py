"""What every adapter offers: `load(job)`, and of what it returns, one measurement at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Job:
    """What a child process is asked to load."""

    checkpoint: Path
    """A Hugging Face directory in bf16, which the adapter converts to what its library reads."""
    work: Path
    """Where conversions are kept for the next run."""
    format: str
    """Of the weights, by the peer's own name."""
    kv: str | None
    """Format of the key-value cache, by the peer's own name; None for the peer's default."""
    threads: int
    context: int
    """Tokens of the longest sequence, prompt and output together."""
    batch: int
    """Sequences at once."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    version: str
    """Of the library, with what else decides its speed."""
    total_bytes: int
    """Of all weights, embedding and head included."""
    token_bytes: int
    """Of the weights that a token must read: all but an embedding table that is not the head as well."""
    kv_bytes_per_token: int
    """Of keys and values."""


@dataclass(frozen=True)
class Timing:
    """One measurement."""

    prefill_seconds: float
    """From the prompts until each sequence has its first token."""
    decode_seconds: float
    """From there to the end."""
    decode_tokens: int
    """Of all sequences, after the first of each."""


class Runner(Protocol):
    """A loaded model."""

    @property
    def loaded(self) -> Loaded:
        """What was loaded."""
        ...

    def measure(self, prompts: list[list[int]], gen: int) -> Timing:
        """Reads `prompts` with nothing cached, and continues each greedily for `gen` more tokens after the first."""
        ...


def only(prompts: list[list[int]]) -> list[int]:
    """The prompt, for an adapter that measures one sequence at a time. Raises ValueError where there are several."""
    if len(prompts) != 1:
        raise ValueError(f"this adapter measures one sequence at a time, not {len(prompts)}")
    return prompts[0]
