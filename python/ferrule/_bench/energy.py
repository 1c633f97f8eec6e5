"""Energy counters of the processor: RAPL, which Linux shows at /sys/class/powercap.

Source: Documentation/power/powercap/powercap.rst of Linux. A zone `intel-rapl:N` (on AMD too) is a processor package
with its cores; its subzone `dram` is the memory, which the package does not include. Most systems allow only root to
read the counters. They count the energy of the whole machine's processors, other programs included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
PACKAGE, DRAM = "package", "dram"
"""Beginnings of the names of zones whose sum is the energy of processors and memory."""
SHORTEST_SECONDS = 0.1
"""Shortest time that is measured: counters are updated about every millisecond."""


@dataclass(frozen=True)
class Counter:
    """Energy counter of a zone."""

    file: Path
    range: int
    """Microjoules after which the counter begins at zero again."""

    def read(self) -> int:
        """Returns the count in microjoules.

        Raises OSError, ValueError.
        """
        return int(self.file.read_text())


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
        """Returns the counts of all zones in microjoules; None if one cannot be read any more."""
        try:
            return [counter.read() for counter in self._counters]
        except (OSError, ValueError):
            return None

    def joules(self, before: list[int] | None, after: list[int] | None, seconds: float) -> float | None:
        """Returns the energy between two readings; None without both or if the time is too short to measure."""
        if before is None or after is None or seconds < SHORTEST_SECONDS:
            return None
        counts = zip(self._counters, before, after, strict=True)
        return sum(end - start + (counter.range if end < start else 0) for counter, start, end in counts) / 1e6
