"""Merges of SentencePiece's BPE, derived from the scores of the pieces and stored in the cache.

Any two adjacent pieces whose concatenation is a piece may be merged, but at most one pair per piece ever is: merges
inside a range of the text do not depend on the text around it, so the last merge that forms a piece is the same as in
the text of this piece alone. The other pairs, more than half of Gemma's, are omitted.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import TypeAlias

from ferrule._loading.cache_home import cache_home
from ferrule._loading.gguf.vocabulary import TokenType, Vocabulary

LARGE = 1 << 16
"""Number of tokens from which on the merges are stored: Gemma's 262,144 tokens take seconds, Llama's 32,000 less than
half a second."""
FORMAT = 2
"""Version of the stored merges, part of the name of the file."""
PIECES = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNDEFINED)
"""Types of tokens that match text; byte tokens encode all other characters."""
DIGEST_BYTES = 16


Merge: TypeAlias = tuple[float, int, int, int, int]
"""Negative score of the merged piece, negative lengths of both parts in characters, and their token ids. The smallest
is applied first, which is the order that transformers derives."""


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns the pairs of pieces that merge in some text, highest score first.

    The merges of a large vocabulary are stored in the cache.
    """
    scores = vocabulary.scores()
    if len(vocabulary.tokens) < LARGE:
        ids = _derived(vocabulary, scores)
    else:
        file = cache_home() / "merges" / _name(vocabulary, scores)
        ids = _read(file)
        if ids is None:
            ids = _derived(vocabulary, scores)
            _write(file, ids)
    parts = map(vocabulary.tokens.__getitem__, ids)
    return list(zip(parts, parts, strict=True))


def _derived(vocabulary: Vocabulary, scores: Sequence[float]) -> array[int]:
    """Returns the ids of the first and the second part of each merge, alternately."""
    ids = {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.of_type(*PIECES)}
    last = (_last_merge(piece, ids, scores) for piece in ids if all(map(ids.__contains__, piece)))
    return array("I", (part for merge in sorted(filter(None, last)) for part in merge[-2:]))


def _last_merge(piece: str, ids: Mapping[str, int], scores: Sequence[float]) -> Merge | None:
    """Returns the merge that completes a piece; None if its characters, which are pieces, do not merge to one piece."""
    parts = list(piece)
    """Text of the part that begins at each character; empty inside a part."""
    queue: list[tuple[Merge, int]] = []
    """Possible merges, each with the position of its first part."""

    def propose(first: str, second: str, position: int) -> None:
        merged = ids.get(first + second)
        if merged is not None:
            heappush(queue, ((-scores[merged], -len(first), -len(second), ids[first], ids[second]), position))

    for position in range(len(parts) - 1):
        propose(parts[position], parts[position + 1], position)
    before = list(range(-1, len(parts) - 1))
    """Position of the part before the one that begins at each character."""
    while queue:
        merge, position = heappop(queue)
        first, following = parts[position], position - merge[1]
        second = parts[following]
        if len(first) != -merge[1] or len(second) != -merge[2]:
            continue  # one of the parts was merged meanwhile
        joined = first + second
        if len(joined) == len(piece):
            return merge
        parts[position], parts[following] = joined, ""
        after = position + len(joined)
        if after < len(parts):
            before[after] = position
            propose(joined, parts[after], position)
        if position:
            propose(parts[before[position]], joined, before[position])
    return None


def _name(vocabulary: Vocabulary, scores: Sequence[float]) -> str:
    """Returns the name of a file, with a digest of everything on which the merges depend."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update("".join(vocabulary.tokens).encode("utf-8", "surrogatepass"))
    digest.update(array("I", map(len, vocabulary.tokens)))
    digest.update(bytes(vocabulary.types))
    digest.update(array("d", scores))
    return f"{FORMAT}-{digest.hexdigest()}"


def _read(file: Path) -> array[int] | None:
    """Returns stored ids; None if they are missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if content[:DIGEST_BYTES] != _checksum(content[DIGEST_BYTES:]):
        return None
    ids = array("I")
    ids.frombytes(content[DIGEST_BYTES:])
    return ids


def _write(file: Path, ids: array[int]) -> None:
    """Stores ids after their checksum; a cache that cannot be written is ignored."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(_checksum(ids) + ids.tobytes())
        new.replace(file)


def _checksum(content: bytes | array[int]) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
