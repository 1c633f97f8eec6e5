"""State that all parsers share: the text, the draft of the message, and the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferrule._text.parsers.draft import Draft
from ferrule._text.parsers.reader import Read, Reader
from ferrule._text.parsers.tools import Tools


@dataclass(frozen=True)
class Thought:
    """Markers around reasoning."""

    begin: str
    end: str
    anywhere: bool
    """Whether reasoning may begin after other text. Markers that an answer may mention, such as `<think>`, are
    recognized only at the beginning of the message."""
    dropped: tuple[str, ...] = ()
    """Markers around the answer, which are removed."""

    @property
    def keep(self) -> frozenset[str]:
        """All markers, which may be special tokens."""
        return frozenset({self.begin, self.end, *self.dropped})


@dataclass(frozen=True)
class State:
    """State of one message."""

    text: Reader
    draft: Draft
    tools: Tools
    thought: Thought | None
    """Markers of reasoning; None to leave reasoning in the content."""
    dropped: tuple[str, ...]
    """Markers around the answer, which are removed."""
    reasoning_open: bool
    """Whether the prompt began the reasoning."""

    def begin(self) -> Read[None]:
        """Reads the reasoning at the beginning of a message."""
        thought = self.thought
        if thought is None:
            return
        self.text.hold()
        yield from self.text.skip_space()
        # A model may repeat the marker of its prompt, or write the end marker alone where it does not think.
        expected = self.reasoning_open or not thought.anywhere
        found = (yield from self.text.accept(thought.begin, thought.end)) if expected else ""
        space = self.text.held()
        if found == thought.end:
            self.draft.mark()
        elif found or self.reasoning_open:
            yield from self._think(thought)
        else:
            self.draft.content(space)

    def content(self, *markers: str) -> Read[str]:
        """Reads up to one of the markers, which it returns, or to the end, and separates reasoning from content."""
        thought = self.thought
        begins = (thought.begin,) if thought is not None and thought.anywhere else ()
        while True:
            marker = yield from self.text.until(*markers, *begins, *self.dropped, into=self.draft.content)
            if thought is not None and marker in begins:
                yield from self._think(thought)
            elif marker in self.dropped and marker not in markers:
                self.draft.mark()
            else:
                return marker

    def as_content(self) -> None:
        """Adds held text to the content, markers included, so that no text is lost."""
        self.draft.content(self.text.held())

    def call_list(self, read_call: Callable[[State], Read[bool]]) -> Read[bool]:
        """Reads a list of calls after its bracket; returns False if its first item is not a call.

        `read_call` reads an item after white space and returns whether it is a call; the text of another one is held.
        """
        written = False
        while True:
            yield from self.text.skip_space()
            if not (yield from read_call(self)):
                break
            written = True
            self.text.hold()
            yield from self.text.skip_space()
            if not (yield from self.text.accept(",")):
                break
        if not written:
            return False
        if (yield from self.text.accept("]")):
            self.text.held()
        self.as_content()
        return True

    def _think(self, thought: Thought) -> Read[None]:
        self.draft.begin_reasoning()
        yield from self.text.until(thought.end, into=self.draft.reasoning)
        self.draft.mark()
