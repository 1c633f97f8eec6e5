"""Detection of endless loops in generated text.

A small model, and above all greedy sampling, may repeat a pattern until the context is full.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PATTERN = 256
"""Number of tokens of the longest pattern whose repetition is detected."""
REPETITIONS = 4
"""Number of times that a pattern occurs in a row in a loop."""
SHORTEST_LOOP = 128
"""Number of tokens of the shortest loop: a table or a drawing may repeat short patterns."""


class LoopGuard:
    """Detects that the last tokens are a pattern that occurs again and again."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._equal = [0] * (LONGEST_PATTERN + 1)
        """For each distance, the number of last tokens that equal the token at this distance before them."""

    def loops(self, token_ids: Sequence[int]) -> bool:
        """Reads tokens and returns whether the text is in a loop."""
        found = False
        for token in token_ids:
            for distance, before in enumerate(reversed(self._last), start=1):
                self._equal[distance] = self._equal[distance] + 1 if before == token else 0
                length = self._equal[distance] + distance
                found = found or (length >= SHORTEST_LOOP and length >= REPETITIONS * distance)
            self._last = [*self._last[1 - LONGEST_PATTERN :], token]
        return found
