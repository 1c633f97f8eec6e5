"""What the machines of all families work on: the text, the message that it becomes, and what is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule._text.parsers.draft import Draft
from ferrule._text.parsers.reader import Read, Reader
from ferrule._text.parsers.tools import Tools


@dataclass(frozen=True)
class Thought:
    """The markers around a family's reasoning."""

    begin: str
    end: str
    anywhere: bool
    """Whether reasoning may also begin after other text: for markers that no text has by chance. Others count at the
    beginning of the message alone, for an answer may well be about `<think>`."""


@dataclass(frozen=True)
class State:
    """One message that is being read."""

    text: Reader
    draft: Draft
    tools: Tools
    thought: Thought | None
    """None where reasoning is not to be told apart."""
    reasoning_open: bool
    """Whether the prompt has begun the reasoning."""

    def begin(self) -> Read[None]:
        """Reads the reasoning that a message begins with."""
        thought = self.thought
        if thought is None:
            return
        self.text.hold()
        yield from self.text.skip_space()
        # A model that finds the marker in its prompt may write it again.
        expected = self.reasoning_open or not thought.anywhere
        found = (yield from self.text.accept(thought.begin)) if expected else ""
        space = self.text.held()
        if found or self.reasoning_open:
            yield from self._think(thought)
        else:
            self.draft.content(space)

    def content(self, *markers: str) -> Read[str]:
        """Reads on to one of the markers, which it returns, or to the end, with reasoning on the way told apart."""
        thought = self.thought
        more = (thought.begin,) if thought is not None and thought.anywhere else ()
        while True:
            marker = yield from self.text.until(*markers, *more, into=self.draft.content)
            if thought is None or marker not in more:
                return marker
            yield from self._think(thought)

    def as_content(self) -> None:
        """What was held is content, markers and all: no text of the model is lost."""
        self.draft.content(self.text.held())

    def _think(self, thought: Thought) -> Read[None]:
        self.draft.begin_reasoning()
        yield from self.text.until(thought.end, into=self.draft.reasoning)
        self.draft.mark()
