"""Draft of a message, which assigns text to the parts of the message and drops whitespace that belongs to the format.

Whitespace beside a marker belongs to the format: around reasoning, and between content and calls. If content continues
after a marker, the whitespace before the marker is kept, or the whitespace after it if there is none before it. Text
without markers is kept unchanged as content.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field

from ferrule._text.parsers.message import MessageDelta, ToolCallDelta
from ferrule._text.parsers.reader import SPACE

ALPHANUMERIC = string.ascii_letters + string.digits


class Draft:
    """Collector of the parts of a message, which emits them as deltas; `ids` yields the ids of calls."""

    def __init__(self, ids: Iterator[str]) -> None:
        self._ids = ids
        self._used: set[str] = set()
        self._content = _MessageText()
        self._reasoning = _MessageText()
        self._calls = 0
        self._new_calls: list[_NewCallParts] = []

    def content(self, text: str) -> None:
        """Adds text of the answer."""
        self._content.write(text)

    def reasoning(self, text: str) -> None:
        """Adds text of the reasoning."""
        self._reasoning.write(text)

    def begin_content(self) -> None:
        """Begins the answer, or another part of it, on a new line."""
        self._content.begin()

    def begin_reasoning(self) -> None:
        """Begins reasoning, or another part of it, on a new line."""
        self._reasoning.begin()

    def mark(self) -> None:
        """Records a marker; whitespace beside it is not part of the answer."""
        self._content.mark()

    def call(self, name: str, call_id: str | None = None) -> None:
        """Begins a call. It gets a new id unless the model gave an id that is not in use."""
        self._content.mark()
        if call_id is None or call_id in self._used:
            call_id = next(new for new in self._ids if new not in self._used)
        self._used.add(call_id)
        self._new_calls.append(_NewCallParts(self._calls, call_id, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the last call."""
        if not self._new_calls:
            self._new_calls.append(_NewCallParts(self._calls - 1, None, None))
        self._new_calls[-1].arguments.append(text)

    def string_in_arguments(self, text: str) -> None:
        """Adds text to the arguments, escaped as part of a JSON string."""
        self.arguments(quoted(text)[1:-1])

    def end(self) -> None:
        """Ends the message."""
        self._content.end()

    def take(self) -> MessageDelta:
        """Returns the parts that were added since the previous `take`."""
        news, self._new_calls = self._new_calls, []
        calls = [ToolCallDelta(call.index, call.id, call.name, "".join(call.arguments)) for call in news]
        return MessageDelta(self._content.take(), self._reasoning.take(), calls)


class Arguments:
    """Writer of a JSON object for arguments that the model writes one by one in another notation."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._before = "{"

    def add(self, key: str, value: str) -> None:
        """Adds an argument with a value in JSON, of which more may follow."""
        self._draft.arguments(f"{self._before}{quoted(key)}: {value}")
        self._before = ", "

    def cut(self, key: str, text: str) -> None:
        """Adds an argument in which the output ended; the object stays open, so that it is not valid JSON."""
        self.add(key, quoted(text)[:-1])

    def end(self) -> None:
        """Ends the arguments."""
        self._draft.arguments("{}" if self._before == "{" else "}")


def quoted(text: str) -> str:
    """Returns a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def call_ids(prefix: str, length: int, seed: int | str | None) -> Iterator[str]:
    """Yields ids of `prefix` and `length` random letters and digits; a seed makes them reproducible."""
    generator = random.Random(seed)
    while True:
        yield prefix + "".join(generator.choices(ALPHANUMERIC, k=length))


@dataclass
class _NewCallParts:
    index: int
    id: str | None
    name: str | None
    arguments: list[str] = field(default_factory=list[str])


class _MessageText:
    """Content or reasoning of the message, without whitespace beside markers."""

    def __init__(self) -> None:
        self._new: list[str] = []
        self._space: list[str] = []
        """Whitespace that is kept if more text follows."""
        self._begun = False
        self._before: str | None = None
        """Replacement of the whitespace before the next text; None to keep it."""
        self._marked = False
        """Whether a marker follows the last text."""

    def write(self, text: str) -> None:
        if self._before is not None:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._new.append(self._before)
            self._before = None
        end = len(text.rstrip(SPACE))
        if end:
            self._new += [*self._space, text[:end]]
            self._space.clear()
            self._begun, self._marked = True, False
        if end < len(text):
            self._space.append(text[end:])

    def begin(self) -> None:
        """Starts a new line before the next text."""
        self._space.clear()
        self._before = "\n" if self._begun else ""

    def mark(self) -> None:
        """Records a marker."""
        if not self._begun:
            self.begin()
        elif self._space:
            self._before = "".join(self._space)
            self._space.clear()
        self._marked = True

    def end(self) -> None:
        if not self._marked:
            self._new += self._space
            self._space.clear()

    def take(self) -> str | None:
        new = "".join(self._new)
        self._new.clear()
        return new or None
