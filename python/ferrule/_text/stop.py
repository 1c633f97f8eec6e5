"""Stop strings in a stream of text, which are matched across tokens. Possible prefixes of a stop string are held back.

An Aho-Corasick automaton reads each character once. Its state is the longest suffix of the text that is a prefix of a
stop string, which is exactly the text to hold back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Node:
    depth: int
    next: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    fallback: _Node | None = None
    """Node of the longest proper suffix that is a prefix of a stop string; None at the root."""
    match: str | None = None
    """Longest stop string that ends at this node."""


class StopStrings:
    """Matcher of stop strings in one text. The first match applies; of several that end together, the longest."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._state = self._root = _automaton(stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """Stop string that matched."""

    def feed(self, text: str) -> str:
        """Reads text and returns the text that is surely not part of a stop string."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self._state = _step(self._state, character)
            if self._state.match is not None:
                self.matched = self._state.match
                self._held = ""
                return buffer[: position if self._include else position - len(self.matched)]
        safe = len(buffer) - self._state.depth
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """Returns the text that was held back, at the end."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _step(node: _Node, character: str) -> _Node:
    while character not in node.next and node.fallback is not None:
        node = node.fallback
    return node.next.get(character, node)


def _automaton(stop: Sequence[str]) -> _Node:
    root = _Node(0)
    for string in stop:
        node = root
        for character in string:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.match = string
    queue = deque([root])
    while queue:
        parent = queue.popleft()
        for character, node in parent.next.items():
            node.fallback = root if parent.fallback is None else _step(parent.fallback, character)
            if node.match is None:
                node.match = node.fallback.match
            queue.append(node)
    return root
