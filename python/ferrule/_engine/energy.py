"""Energy counters of the processor: RAPL, which Linux shows at /sys/class/powercap.

Source: Documentation/power/powercap/powercap.rst of Linux. A zone `intel-rapl:N` (on AMD too) is a processor package
with its cores; its subzone `dram` is the memory, which the package does not include. Most systems allow only root to
read the counters. They count the energy of the whole machine's processors, other programs included.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

POWERCAP = Path("/sys/class/powercap")
PACKAGE, DRAM = "package", "dram"
"""Beginnings of the names of zones whose sum is the energy of processors and memory."""
UPDATE_SECONDS = 0.001
"""Time between two updates of a counter, about."""
SHORTEST_SECONDS = 0.1
"""Shortest time that is measured."""
COUNT_BYTES = 32
"""More bytes than a count has digits."""
MARKS = 1 << 16
"""Largest number of readings that are kept: those of minutes. Energy that was used before them is unknown."""


class Counter:
    """Energy counter of a zone, whose file stays open."""

    def __init__(self, file: Path, range_: int) -> None:
        """Opens the counter, which begins at zero again after `range_` microjoules.

        Raises OSError.
        """
        self.range = range_
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> int:
        """Returns the count in microjoules.

        Raises OSError, ValueError.
        """
        return int(os.pread(self._descriptor, COUNT_BYTES, 0))


class EnergyMeter:
    """Sum of the energy counters of all packages and their memory."""

    def __init__(self, counters: list[Counter]) -> None:
        self._counters = counters

    @classmethod
    def open(cls) -> EnergyMeter | None:
        """Returns the meter of this machine; None where it has no counters or this user must not read them."""
        counters: list[Counter] = []
        for zone in sorted(POWERCAP.glob("intel-rapl:*")):
            try:
                if not (zone / "name").read_text().strip().startswith((PACKAGE, DRAM)):
                    continue
                counter = Counter(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
                counter.read()
            except (OSError, ValueError):
                return None  # a sum without one of the zones would be wrong
            counters.append(counter)
        return cls(counters) if counters else None

    def read(self) -> list[int] | None:
        """Returns the counts of all zones in microjoules; None if one is no longer readable."""
        try:
            return [counter.read() for counter in self._counters]
        except (OSError, ValueError):
            return None

    def joules(self, before: list[int] | None, after: list[int] | None, seconds: float) -> float | None:
        """Returns the energy between two readings; None without both or if the time is too short to measure."""
        if before is None or after is None or seconds < SHORTEST_SECONDS:
            return None
        return self.difference(before, after)

    def difference(self, before: list[int], after: list[int]) -> float:
        """Returns the joules between two readings, however close."""
        counts = zip(self._counters, before, after, strict=True)
        return sum(end - start + (counter.range if end < start else 0) for counter, start, end in counts) / 1e6


class Mark(NamedTuple):
    """A reading of the meter."""

    time: float
    """Time of `time.perf_counter`."""
    joules: float
    """Energy since the first reading."""
    counts: list[int]


class EnergyLog:
    """Energy of the machine over time: readings at the ends of all engines' steps, and before steps after pauses."""

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter: EnergyMeter | None = meter
        self._lock = threading.Lock()
        self._marks: list[Mark] = []
        """Readings in the order of time."""

    def mark_begin(self) -> None:
        """Reads the meter before a step, unless the previous step has ended just now."""
        if not self._marks or time.perf_counter() - self._marks[-1].time > UPDATE_SECONDS:
            self.mark()

    def mark(self) -> float | None:
        """Reads the meter; returns the joules since the first reading, or None once it is no longer readable."""
        with self._lock:
            counts = None if self._meter is None else self._meter.read()
            if self._meter is None or counts is None:
                self._meter = None
                return None
            joules = 0.0
            if self._marks:
                joules = self._marks[-1].joules + self._meter.difference(self._marks[-1].counts, counts)
            self._marks.append(Mark(time.perf_counter(), joules, counts))
            if len(self._marks) > MARKS:
                del self._marks[: MARKS // 2]
            return joules

    def phases(self, scheduled: float, first: float, last: float) -> tuple[float | None, float | None]:
        """Returns the joules of prefill and decode of a request, by the times of its first and its last token.

        A phase is measured from the beginning or the end of an engine step to the end of another one. The joules are
        None for a phase whose readings are missing and for a short one.
        """
        with self._lock:
            if self._meter is None or not self._marks:
                return None, None
            newest = len(self._marks) - 1
            begin = bisect_right(self._marks, scheduled, key=_time_of) - 1
            # A token is older than the reading at the end of its step.
            middle, end = (min(bisect_left(self._marks, each, key=_time_of), newest) for each in (first, last))
            is_kept = [begin >= 0, self._marks[0].time <= first]
            spans = [(begin, middle, first - scheduled), (middle, end, last - first)]
            prefill, decode = (
                self._marks[stop].joules - self._marks[start].joules if kept and seconds >= SHORTEST_SECONDS else None
                for kept, (start, stop, seconds) in zip(is_kept, spans, strict=True)
            )
            return prefill, decode


def _time_of(mark: Mark) -> float:
    return mark.time


@lru_cache(maxsize=1)
def energy_log() -> EnergyLog | None:
    """Returns the log of this machine; None where it has no counters or this user must not read them."""
    meter = EnergyMeter.open()
    return None if meter is None else EnergyLog(meter)
