"""Limits of time and memory for chat templates, which are untrusted programs.

Work is counted in units. A unit is about one character written, sixteen characters read, or a quarter of a step. It
takes less than a microsecond and at most about six bytes, so a limit of units bounds time and memory, and is the same
on every machine. A limit of processor time covers operations whose units underestimate their time.

A concatenated string refunds its units when it is freed, except for the units of copying it. A template that appends
every message to one text copies the text as many times as there are messages, but holds only one copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, cast

from ferrule.errors import ChatTemplateError

BASE_UNITS = 1 << 19
UNITS_PER_CHARACTER = 512
"""Units that a template may spend for each character of the conversation. Most templates spend ten; templates that copy
the text for each message spend a tenth of the number of messages."""
MAX_UNITS = 1 << 28

BASE_SECONDS = 1.0
"""Maximum seconds of processor time in the rendering thread."""
SECONDS_PER_CHARACTER = 2e-5
MAX_SECONDS = 30.0
MAX_DEPTH = 100
"""Maximum nesting depth of lists and dicts, since Python hashes and compares nested values by recursion in C."""
MAX_BITS = 1 << 16
"""Maximum number of bits of an integer, since arithmetic on larger integers takes unbounded time."""
STEP = 4
"""Units of a step, which is one execution of one node of the template's syntax tree."""
ITEM = 16
"""Units of a list item."""
READ = 16
"""Number of characters to read for one unit."""
CLOCK_UNITS = 512
"""Units between two checks of the clock."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a value as text; a part that occurs several times counts each time."""

    characters: int
    items: int
    """Number of values that it contains, itself included."""
    depth: int
    numbers: int
    """Sum of the absolute values of the integers in it, which may be used as widths."""

    @property
    def units(self) -> int:
        """Approximate number of characters of the value as text."""
        return self.characters + self.items

    def __add__(self, other: Size) -> Size:
        return Size(
            self.characters + other.characters,
            self.items + other.items,
            max(self.depth, other.depth),
            self.numbers + other.numbers,
        )


class Budget:
    """Remaining units and time of one rendering, for a conversation with this number of `characters`."""

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self._limit = min(BASE_UNITS + UNITS_PER_CHARACTER * characters, MAX_UNITS)
        self._spent = 0
        self._seconds = min(BASE_SECONDS + SECONDS_PER_CHARACTER * characters, MAX_SECONDS)
        self._deadline = time.thread_time() + self._seconds
        self._next_check = CLOCK_UNITS
        self._parts = 0
        """Number of characters of operands that have been charged, but are not yet part of a concatenation."""

    def spend(self, units: int) -> None:
        """Spends units.

        Raises ChatTemplateError if fewer are left.
        """
        self._spent += units
        if self._spent >= self._next_check:
            self.require(0)
            self._check_clock()
            self._next_check = self._spent + CLOCK_UNITS

    def require(self, units: int) -> None:
        """Checks that this number of units is left, without spending them.

        Raises ChatTemplateError.
        """
        if self._spent + units > self._limit:
            raise ChatTemplateError(
                f"the chat template exceeds its limit of {self._limit} units of work (characters written and steps "
                f"taken) for a conversation of {self._characters} characters"
            )

    def write(self, value: object) -> None:
        """Spends the units of a value's text before it is written."""
        if isinstance(value, str):
            self.spend(len(value))
            return
        units = self.measure(value).units
        self.require(ITEM * units)
        self.spend(units)

    def read(self, *values: object) -> Size:
        """Spends the units of reading values, and returns their size."""
        size = self.measure(values[0] if len(values) == 1 else values)
        self.require(ITEM * size.units)
        self.spend(1 + size.units // READ)
        return size

    def made(self, value: object) -> None:
        """Spends the units of a new value, without the values that it contains."""
        self.spend(1 + breadth(value))
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ChatTemplateError(
                f"the chat template computes an integer of {value.bit_length()} bits; the maximum is {MAX_BITS}"
            )

    def refund(self, units: int) -> None:
        """Adds units back whose memory has been freed."""
        self._spent -= units
        self._next_check = min(self._next_check, self._spent + CLOCK_UNITS)

    def part(self, operand: object) -> str:
        """Spends the units of an operand of a concatenation, and returns its text."""
        if not isinstance(operand, str):
            self.write(operand)
            operand = str(operand)
        self.spend(len(operand))
        self._parts += len(operand)
        return operand

    def joined(self, text: str) -> str:
        """Returns the concatenation of parts as a string that refunds their units when it is freed."""
        units = min(len(text), self._parts)  # the string may not be a concatenation
        self._parts -= units
        return self.temporary(text, units)

    def temporary(self, text: str, units: int) -> str:
        """Returns a string that refunds `units` when it is freed; spends the time to copy it."""
        self.spend(1 + len(text) // READ)
        return _Temporary(text, self, units)

    def counted(self, values: Iterable[object], units: int) -> Iterator[object]:
        """Yields values and spends `units` for each."""
        for value in values:
            self.spend(units)
            yield value

    def measure(self, value: object) -> Size:
        """Returns the size of a value.

        Raises ChatTemplateError if it exceeds the remaining units or MAX_DEPTH levels.
        """
        characters, items, depth, numbers = 0, 0, 0, 0
        left = self._limit - self._spent
        levels: list[Iterator[object]] = [iter((value,))]
        while levels:
            for each in levels[-1]:
                items += 1
                if items % CLOCK_UNITS == 0:
                    self._check_clock()
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
                raise ChatTemplateError(f"a value in the chat template has more than {MAX_DEPTH} levels of nesting")
        return Size(characters, items, depth, numbers)

    def _check_clock(self) -> None:
        if time.thread_time() > self._deadline:
            raise ChatTemplateError(
                f"the chat template exceeds its limit of {self._seconds:.2g} seconds of processor time for a "
                f"conversation of {self._characters} characters"
            )


class _Temporary(str):
    """String that refunds its units when it is freed."""

    __slots__ = ("_budget", "_units")

    def __new__(cls, text: str, budget: Budget, units: int) -> Self:
        created = super().__new__(cls, text)
        created._budget, created._units = budget, units
        return created

    def __del__(self) -> None:
        self._budget.refund(self._units)


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")
"""Budget of the current rendering; unset while a template is compiled."""


def breadth(value: object) -> int:
    """Returns the units of a value without its items' contents: its characters, or ITEM for each item."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple, dict)):
        return ITEM * len(cast("list[object]", value))
    return 0


_MAP: dict[object, object] = {}
_SEQUENCES = (list, tuple, range, type(_MAP.keys()), type(_MAP.values()), type(_MAP.items()))


def _inner(value: object) -> Iterator[object] | None:
    """Returns the values in a container."""
    if isinstance(value, dict):
        held = cast("dict[object, object]", value)
        return chain(held.keys(), held.values())
    if isinstance(value, _SEQUENCES):
        return iter(cast("Iterable[Any]", value))
    return None
