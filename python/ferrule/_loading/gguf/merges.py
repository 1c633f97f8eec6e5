"""Merges of SentencePiece's BPE, derived from the scores of the pieces and stored in the cache."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ferrule._loading.cache_home import cache_home
from ferrule._loading.gguf.vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE = 1 << 16
"""Number of tokens from which on the pairs are stored: Gemma's 262,144 tokens take seconds, Llama's 32,000 less than
half a second."""
FORMAT = 1
"""Version of the stored pairs, part of the name of the file."""
PIECES = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNDEFINED)
"""Types of tokens that match text; byte tokens encode all other characters."""


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns all pairs that concatenate to a piece, highest score first, as transformers derives them.

    The pairs of a large vocabulary are stored in the cache.
    """
    scores = np.array(vocabulary.scores(), np.float64)
    if len(vocabulary.tokens) < LARGE:
        pairs = _pairs(vocabulary, scores)
    else:
        file = cache_home() / "merges" / f"{_digest(vocabulary, scores)}.npy"
        pairs = _read_pairs(file, len(vocabulary.tokens))
        if pairs is None:
            pairs = _pairs(vocabulary, scores)
            _write_pairs(file, pairs)
    tokens = vocabulary.tokens
    first, second = pairs.T.tolist()
    return list(zip(map(tokens.__getitem__, first), map(tokens.__getitem__, second), strict=True))


def _pairs(vocabulary: Vocabulary, scores: NDArray[np.float64]) -> NDArray[np.int32]:
    """Returns the ids of the pairs, [pairs, 2]."""
    tokens = vocabulary.tokens
    ids = {tokens[token_id]: token_id for token_id in vocabulary.of_type(*PIECES)}
    found: list[tuple[int, int, int, int, int]] = []
    for piece, token_id in ids.items():
        for cut in range(1, len(piece)):
            first = ids.get(piece[:cut])
            if first is not None:
                second = ids.get(piece[cut:])
                if second is not None:
                    found.append((token_id, cut, len(piece), first, second))
    if not found:
        return np.empty((0, 2), np.int32)
    merged, cuts, lengths, first, second = np.array(found, np.int64).T
    # Highest score first, then the longest first and the longest second part; the last key sorts first.
    order = np.lexsort((second, first, cuts - lengths, -cuts, -scores[merged]))
    return np.stack([first, second], 1)[order].astype(np.int32)


def _digest(vocabulary: Vocabulary, scores: NDArray[np.float64]) -> str:
    """Returns the digest of everything on which the pairs depend."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update("".join(vocabulary.tokens).encode("utf-8", "surrogatepass"))
    digest.update(np.array([len(token) for token in vocabulary.tokens], np.int32).tobytes())
    digest.update(np.array(vocabulary.types, np.int32).tobytes())
    digest.update(scores.tobytes())
    return f"{FORMAT}-{digest.hexdigest()}"


def _read_pairs(file: Path, tokens: int) -> NDArray[np.int32] | None:
    """Returns stored pairs; None if they are missing or damaged."""
    try:
        pairs: NDArray[np.int32] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_valid = pairs.dtype == np.int32 and pairs.ndim == 2 and pairs.shape[1] == 2
    return pairs if is_valid and (not pairs.size or (pairs.min() >= 0 and pairs.max() < tokens)) else None


def _write_pairs(file: Path, pairs: NDArray[np.int32]) -> None:
    """Stores pairs; a cache that cannot be written is ignored."""
    new = file.with_name(f".{file.name}.{os.getpid()}.npy")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(new, pairs)
        new.replace(file)
