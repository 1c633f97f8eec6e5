"""The ceilings of the machine, taken again and again between the runs of a model.

Machines are shared and clocks move: a ceiling counts beside what ran in the same seconds, and a window in which others
had the processors counts for nothing. The rate of plain integer additions, which depends on nothing but the processors
themselves, tells such a window.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 5
"""Number of runs of each probe; the median counts, because the figure of a model is a mean over seconds."""

GOOD_SHARE = 0.85
"""Share of the highest observed additions per second below which a window counts as disturbed."""


@dataclass(frozen=True)
class Ceilings:
    """Throughput of the machine at one time, per second."""

    read: float
    """Bytes read."""
    int8: float
    """int8 operations; a multiply-add is two."""
    f32: float
    """f32 operations."""
    adds: float
    """Integer additions."""

    def record(self) -> dict[str, float]:
        """Returns the figures under their names in records."""
        figures = {"read_gbps": self.read, "int8_gops": self.int8, "f32_gflops": self.f32, "add_probe": self.adds}
        return {name: figure / 1e9 for name, figure in figures.items()}


class Machine:
    """Probes on as many threads as a model has.

    Raises InsufficientMemoryError.
    """

    def __init__(self, threads: int) -> None:
        from ferrule import _native

        self._probes = _native.Ceilings(threads)
        self.read_bytes = self._probes.read_bytes
        """Bytes of memory that the probe of the read bandwidth goes through."""
        self._most_adds = {True: 0.0, False: 0.0}

    def measure(self, *, alone: bool = False) -> Ceilings:
        """The ceilings of now, on all threads or on one `alone`."""
        passes = [self._probes.measure(alone=alone) for _ in range(PASSES)]
        read, int8, f32, adds = map(statistics.median, zip(*passes, strict=True))
        ceilings = Ceilings(read, int8, f32, adds)
        self._most_adds[alone] = max(self._most_adds[alone], ceilings.adds)
        return ceilings

    def is_bad(self, ceilings: Ceilings, *, alone: bool = False) -> bool:
        """Whether they are of a bad window, as far as is known by now."""
        return ceilings.adds < GOOD_SHARE * self._most_adds[alone]


def median(ceilings: Sequence[Ceilings]) -> Ceilings:
    """The median of each figure."""
    return Ceilings(
        read=statistics.median(each.read for each in ceilings),
        int8=statistics.median(each.int8 for each in ceilings),
        f32=statistics.median(each.f32 for each in ceilings),
        adds=statistics.median(each.adds for each in ceilings),
    )


def between(before: Ceilings, after: Ceilings) -> Ceilings:
    """The ceilings of what ran between the two: their means, and the fewer additions."""
    return Ceilings(
        read=(before.read + after.read) / 2,
        int8=(before.int8 + after.int8) / 2,
        f32=(before.f32 + after.f32) / 2,
        adds=min(before.adds, after.adds),
    )
