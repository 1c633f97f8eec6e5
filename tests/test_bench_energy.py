"""Energy in `ferrule bench`: counters of RAPL in a directory like /sys/class/powercap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferrule._bench import energy
from ferrule._bench.energy import EnergyMeter
from ferrule._cli import main

RANGE = 1000


@pytest.fixture
def zones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two packages, one of which has a counter of its cores and one of its memory."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    names = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1", "2": "psys"}
    for zone, name in names.items():
        folder = tmp_path / f"intel-rapl:{zone}"
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        count(tmp_path, zone, 0)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def count(zones: Path, zone: str, microjoules: int) -> None:
    (zones / f"intel-rapl:{zone}" / "energy_uj").write_text(f"{microjoules}\n")


def test_energy_is_the_sum_of_packages_and_memory(zones: Path) -> None:
    meter = EnergyMeter.open()
    assert meter is not None
    before = meter.read()
    for zone, microjoules in {"0": 100, "0:0": 50, "0:1": 20, "1": 3, "2": 500}.items():
        count(zones, zone, microjoules)
    assert meter.joules(before, meter.read(), seconds=1) == pytest.approx(123e-6)


def test_counters_that_begin_again_are_continued(zones: Path) -> None:
    count(zones, "0", RANGE - 100)
    meter = EnergyMeter.open()
    assert meter is not None
    before = meter.read()
    count(zones, "0", 50)
    assert meter.joules(before, meter.read(), seconds=1) == pytest.approx(150e-6)


def test_short_times_and_missing_readings_are_not_measured(zones: Path) -> None:
    meter = EnergyMeter.open()
    assert meter is not None
    before = meter.read()
    assert meter.joules(before, meter.read(), seconds=0.05) is None
    (zones / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.read() is None
    assert meter.joules(before, None, seconds=1) is None


@pytest.mark.parametrize("broken", ["energy_uj", "max_energy_range_uj", "name"])
def test_machine_with_an_unreadable_counter_is_not_measured(zones: Path, broken: str) -> None:
    (zones / "intel-rapl:1" / broken).unlink()
    assert EnergyMeter.open() is None


def test_machine_without_counters_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    assert EnergyMeter.open() is None


class SteadyMeter(EnergyMeter):
    """Meter of a machine that uses six joules between two readings."""

    readings = 0

    def read(self) -> list[int] | None:
        self.readings += 1
        return [6_000_000 * self.readings]


def test_record_has_joules_per_token(
    zones: Path, fake_engine: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--prompt", "16", "--gen", "4", "--repeat", "1"]
    assert main([*arguments, "--json"]) == 0
    assert not [name for name in json.loads(capsys.readouterr().out) if "joules" in name], "the run is too short"
    monkeypatch.setattr(energy, "SHORTEST_SECONDS", 0)
    counter = energy.Counter(zones / "unread", RANGE)
    monkeypatch.setattr(EnergyMeter, "open", lambda: SteadyMeter([counter]))
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prefill_joules_per_token"] == pytest.approx(6 / 16)
    assert record["decode_joules_per_token"] == pytest.approx(6 / 3), "the first token belongs to prefill"
    assert main(arguments) == 0
    assert "prefill 0.375 J/token, decode 2 J/token" in " ".join(capsys.readouterr().out.split())
