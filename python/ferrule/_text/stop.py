"""Stop strings in a stream: found wherever tokens split them, and nothing that may become one is let out early.

An Aho-Corasick automaton reads each character once. Its state is the longest end of the text that begins a stop
string: exactly what must be held back.
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
    """The longest proper suffix of this text that is a node too; None at the root."""
    match: str | None = None
    """The longest stop string that this text ends with."""


class StopStrings:
    """Watches one text. The match that ends first wins; among those that end together, the longest."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._state = self._root = _automaton(stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """More text in, and out what can no longer be part of a stop string."""
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
        """What was held back, when no more text comes."""
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
