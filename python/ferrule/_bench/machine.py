"""Ceilings of the machine, measured repeatedly between the runs of a model.

Machines are shared and clock rates change, so each run is compared with the ceilings measured directly before and after
it. A measurement during which other processes used the CPUs is discarded; a low rate of integer additions, which
depends only on the CPUs, reveals it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 5
"""Number of runs of each probe; their median is used."""

GOOD_SHARE = 0.85
"""A measurement counts as disturbed if its rate of additions is below this share of the highest rate so far."""


@dataclass(frozen=True)
class Ceilings:
    """Throughput of the machine per second, in one measurement."""

    read: float
    """Bytes read."""
    int8: float
    """Number of int8 operations; a multiply-add counts as two."""
    f32: float
    """f32 operations."""
    adds: float
    """Integer additions."""

    def record(self) -> dict[str, float]:
        """Returns the figures under their names in records."""
        figures = {"read_gbps": self.read, "int8_gops": self.int8, "f32_gflops": self.f32, "add_probe": self.adds}
        return {name: figure / 1e9 for name, figure in figures.items()}


class Machine:
    """Probes of the ceilings, on as many threads as a model uses.

    Raises InsufficientMemoryError.
    """

    def __init__(self, threads: int) -> None:
        from ferrule import _native

        self._probes = _native.Ceilings(threads)
        self.read_bytes = self._probes.read_bytes
        """Bytes of memory that the probe of the read bandwidth reads."""
        self._most_adds = {True: 0.0, False: 0.0}

    def measure(self, *, alone: bool = False) -> Ceilings:
        """Measures the ceilings, on all threads or, with `alone`, on one."""
        passes = [self._probes.measure(alone=alone) for _ in range(PASSES)]
        read, int8, f32, adds = map(statistics.median, zip(*passes, strict=True))
        ceilings = Ceilings(read, int8, f32, adds)
        self._most_adds[alone] = max(self._most_adds[alone], ceilings.adds)
        return ceilings

    def is_bad(self, ceilings: Ceilings, *, alone: bool = False) -> bool:
        """Whether the measurement was disturbed by other processes, by the rates observed so far."""
        return ceilings.adds < GOOD_SHARE * self._most_adds[alone]


def median(ceilings: Sequence[Ceilings]) -> Ceilings:
    """Returns the median of each figure."""
    return Ceilings(
        read=statistics.median(each.read for each in ceilings),
        int8=statistics.median(each.int8 for each in ceilings),
        f32=statistics.median(each.f32 for each in ceilings),
        adds=statistics.median(each.adds for each in ceilings),
    )


def between(before: Ceilings, after: Ceilings) -> Ceilings:
    """Returns the ceilings for a run between two measurements: mean throughputs, and the lower rate of additions."""
    return Ceilings(
        read=(before.read + after.read) / 2,
        int8=(before.int8 + after.int8) / 2,
        f32=(before.f32 + after.f32) / 2,
        adds=min(before.adds, after.adds),
    )
