"""What rendering may cost: a template of a model's repository is a program of a stranger.

Work is counted in units: about a character written, sixteen read, or a step taken. Each unit stands for less than a
microsecond and for at most about six bytes that stay allocated, so the limit of units caps time and memory together,
and does so the same on every machine. The clock is looked at besides, for what the count misjudges.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from ferrule.errors import ChatTemplateError

BASE_UNITS = 1 << 19
UNITS_PER_CHARACTER = 512
"""Most templates take ten; those that write all of the text again for each message take half as many as messages."""
MAX_UNITS = 1 << 28

BASE_SECONDS = 1.0
"""Of processor time in the thread that renders."""
SECONDS_PER_CHARACTER = 2e-5
MAX_SECONDS = 30.0
MAX_DEPTH = 100
"""Levels of lists and maps. Python hashes and compares nested values by recursion in C."""
MAX_BITS = 1 << 16
"""Of a whole number: multiplying and dividing larger ones takes time that nobody foresees."""
STEP = 4
"""Units of a step: a node of a template's tree, each time that the code around it runs."""
ITEM = 16
"""Units of an item of a list."""
READ = 16
"""Characters that are read for one unit."""
CLOCK_UNITS = 512
"""Units between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a value holds when it is written out: what occurs twice in it counts twice."""

    characters: int
    items: int
    """All values in it, itself too."""
    depth: int
    numbers: int
    """Of the whole numbers in it, the sum without signs: what they may ask for as widths."""

    @property
    def units(self) -> int:
        """About the characters of its text."""
        return self.characters + self.items

    def __add__(self, other: Size) -> Size:
        return Size(
            self.characters + other.characters,
            self.items + other.items,
            max(self.depth, other.depth),
            self.numbers + other.numbers,
        )


class Budget:
    """The units and the time that are left to one rendering of a conversation of so many characters."""

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self._limit = min(BASE_UNITS + UNITS_PER_CHARACTER * characters, MAX_UNITS)
        self._spent = 0
        self._seconds = min(BASE_SECONDS + SECONDS_PER_CHARACTER * characters, MAX_SECONDS)
        self._deadline = time.thread_time() + self._seconds
        self._next_look = CLOCK_UNITS

    def spend(self, units: int) -> None:
        """Raises ChatTemplateError where that is more than is left."""
        self._spent += units
        if self._spent >= self._next_look:
            self.require(0)
            self._look_at_the_clock()
            self._next_look = self._spent + CLOCK_UNITS

    def require(self, units: int) -> None:
        """Raises ChatTemplateError unless so much is left."""
        if self._spent + units > self._limit:
            raise ChatTemplateError(
                f"the chat template does too much: the limit is {self._limit} units of work (characters written and "
                f"steps taken) for a conversation of {self._characters} characters"
            )

    def write(self, value: object) -> None:
        """Spends what the text of a value is, before it is written."""
        if isinstance(value, str):
            self.spend(len(value))
            return
        units = self.measure(value).units
        self.require(ITEM * units)
        self.spend(units)

    def read(self, *values: object) -> Size:
        """Spends what looking at all of the values costs, and returns their size."""
        size = self.measure(values[0] if len(values) == 1 else values)
        self.require(ITEM * size.units)
        self.spend(1 + size.units // READ)
        return size

    def made(self, value: object) -> None:
        """Spends what a new value takes; what is in it was there before."""
        self.spend(1 + breadth(value))
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ChatTemplateError(f"the chat template makes a number of {value.bit_length()} bits; {MAX_BITS} may be")

    def counted(self, values: Iterable[object], units: int) -> Iterator[object]:
        """The values, each for so many units as it is taken."""
        for value in values:
            self.spend(units)
            yield value

    def measure(self, value: object) -> Size:
        """How much a value holds.

        Raises ChatTemplateError for more than is left, and for more than MAX_DEPTH levels.
        """
        characters, items, depth, numbers = 0, 0, 0, 0
        left = self._limit - self._spent
        levels: list[Iterator[object]] = [iter((value,))]
        while levels:
            for each in levels[-1]:
                items += 1
                if items % CLOCK_UNITS == 0:
                    self._look_at_the_clock()
                if isinstance(each, str):
                    characters += len(each)
                    continue
                if isinstance(each, int):
                    characters += each.bit_length() // READ
                    numbers += abs(each)
                    continue
                inner = _inner(each)
                if inner is not None:
                    levels.append(inner)
                    break
            else:
                levels.pop()
            if items + characters > left:
                self.require(items + characters)
            depth = max(depth, len(levels) - 1)
            if depth > MAX_DEPTH:
                raise ChatTemplateError(f"a value of the chat template has more than {MAX_DEPTH} levels, the limit")
        return Size(characters, items, depth, numbers)

    def _look_at_the_clock(self) -> None:
        if time.thread_time() > self._deadline:
            raise ChatTemplateError(
                f"the chat template takes too long: the limit is {self._seconds:.2g} seconds of processor time for a "
                f"conversation of {self._characters} characters"
            )


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")
"""Of the rendering that runs in this thread. While a template is compiled there is none."""


def breadth(value: object) -> int:
    """Units of a value itself: characters, or ITEM for each item."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple, dict)):
        return ITEM * len(cast("list[object]", value))
    return 0


_MAP: dict[object, object] = {}
_SEQUENCES = (list, tuple, range, type(_MAP.keys()), type(_MAP.values()), type(_MAP.items()))


def _inner(value: object) -> Iterator[object] | None:
    """The values in one that is written out with them."""
    if isinstance(value, dict):
        held = cast("dict[object, object]", value)
        return chain(held.keys(), held.values())
    if isinstance(value, _SEQUENCES):
        return iter(cast("Iterable[Any]", value))
    return None
