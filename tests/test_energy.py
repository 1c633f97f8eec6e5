"""Energy in `ferrule bench`, metrics of requests and /metrics: counters of RAPL in a directory like powercap's."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import TINY
from ferrule import LLM, AsyncLLM, SamplingParams
from ferrule._cli import main
from ferrule._engine import energy
from ferrule._engine.energy import EnergyLog, EnergyMeter, energy_log
from server.live import serving

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
    (zones / "intel-rapl:1" / "energy_uj").write_text("")
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
    monkeypatch.setattr(energy, "SHORTEST_SECONDS", math.inf)
    assert main([*arguments, "--json"]) == 0
    assert not [name for name in json.loads(capsys.readouterr().out) if "joules" in name], "the run is too short"
    monkeypatch.setattr(energy, "SHORTEST_SECONDS", 0)
    counter = energy.Counter(zones / "intel-rapl:0" / "energy_uj", RANGE)
    monkeypatch.setattr(EnergyMeter, "open", lambda: SteadyMeter([counter]))
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prefill_joules_per_token"] == pytest.approx(6 / 16)
    assert record["decode_joules_per_token"] == pytest.approx(6 / 3), "the first token belongs to prefill"
    assert main(arguments) == 0
    assert "prefill 0.375 J/token, decode 2 J/token" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time of readings."""
    now = [0.0]
    monkeypatch.setattr(energy.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_log_has_the_energy_of_phases(zones: Path, clock: Callable[[float], None]) -> None:
    meter = EnergyMeter.open()
    assert meter is not None
    log = EnergyLog(meter)
    for second, microjoules in enumerate((100, 300, 900, 200)):  # the last one has begun again
        clock(second)
        count(zones, "0", microjoules)
        log.mark()
    assert log.mark() == pytest.approx(1100e-6)
    assert log.phases(0.0, 0.9, 2.9) == pytest.approx((200e-6, 900e-6)), "to the ends of steps"
    assert log.phases(0.5, 1.0, 9.0) == pytest.approx((200e-6, 900e-6))
    assert log.phases(-0.5, 1.0, 2.0) == (None, pytest.approx(600e-6)), "scheduled before the first reading"
    assert log.phases(-2.0, -1.0, 2.0) == (None, None)
    assert log.phases(0.0, 0.05, 0.1) == (None, None), "too short"


def test_step_begins_with_a_reading_only_after_a_pause(zones: Path, clock: Callable[[float], None]) -> None:
    meter = EnergyMeter.open()
    assert meter is not None
    log = EnergyLog(meter)
    log.mark_begin()
    clock(1.0)
    count(zones, "0", 100)
    log.mark()
    clock(1.0 + energy.UPDATE_SECONDS / 2)
    count(zones, "0", 300)
    log.mark_begin()
    clock(2.0)
    log.mark()
    assert log.phases(0.5, 1.0, 2.0) == pytest.approx((100e-6, 200e-6)), "the reading at 1.0 is that of the next step"
    clock(3.0)
    count(zones, "0", 600)
    log.mark_begin()
    clock(4.0)
    count(zones, "0", 700)
    log.mark()
    assert log.phases(3.0, 4.0, 5.0) == (pytest.approx(100e-6), 0), "without the energy of the pause"


def test_counters_stay_open(zones: Path) -> None:
    meter = EnergyMeter.open()
    assert meter is not None
    before = meter.read()
    for file in zones.glob("*/energy_uj"):
        file.rename(file.with_name("moved"))
    assert meter.read() == before


def test_log_forgets_old_readings(zones: Path, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "MARKS", 4)
    meter = EnergyMeter.open()
    assert meter is not None
    log = EnergyLog(meter)
    for second in range(6):
        clock(second)
        count(zones, "0", second)
        log.mark()
    assert log.phases(0, 4, 5) == (None, pytest.approx(1e-6))


def test_log_ends_with_a_counter_that_cannot_be_read_any_more(zones: Path) -> None:
    meter = EnergyMeter.open()
    assert meter is not None
    log = EnergyLog(meter)
    assert log.mark() == 0
    (zones / "intel-rapl:1" / "energy_uj").write_text("")
    assert log.mark() is None
    count(zones, "1", 5)
    assert log.mark() is None
    assert log.phases(0, 1, 2) == (None, None)


@pytest.fixture
def measured(zones: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose counter rises by one joule with each reading, and on which no time is too short."""
    readings = itertools.count()
    monkeypatch.setattr(energy, "SHORTEST_SECONDS", 0)
    monkeypatch.setattr(EnergyMeter, "read", lambda _: [1_000_000 * next(readings), 0, 0])
    energy_log.cache_clear()
    yield
    energy_log.cache_clear()


@pytest.mark.native
@pytest.mark.usefixtures("measured")
def test_outputs_have_the_energy_of_prefill_and_decode() -> None:
    with LLM(TINY) as llm:
        [output] = llm.generate("The capital", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert output.metrics.prefill_joules is not None
    assert output.metrics.prefill_joules >= 1
    assert output.metrics.decode_joules is not None
    assert output.metrics.decode_joules >= 1
    # A phase ends with the reading nearest to its last token, which may be that of the next step.
    assert output.metrics.prefill_joules + output.metrics.decode_joules >= 8, "a reading at least for each step"


@pytest.mark.native
@pytest.mark.usefixtures("measured")
def test_metrics_have_the_energy_of_requests_and_of_the_machine() -> None:
    with serving(llm=AsyncLLM) as live:
        assert live.complete(max_tokens=8, temperature=0, ignore_eos=True).status == 200
        lines = live.request("/metrics").body.decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if "joules" in line and not line.startswith("#"))
    requests = {name.split("{")[0]: float(value) for name, value in found.items() if "created" not in name}
    prefill, decode = (requests[f"ferrule:request_{phase}_joules_total"] for phase in ("prefill", "decode"))
    assert min(prefill, decode) >= 1
    assert prefill + decode >= 8
    assert requests["ferrule:energy_joules_total"] > decode


@pytest.mark.native
def test_energy_is_absent_where_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    energy_log.cache_clear()
    with serving(llm=AsyncLLM) as live:
        assert live.complete(max_tokens=2).status == 200
        assert "joules" not in live.request("/metrics").body.decode()
    with LLM(TINY) as llm:
        metrics = llm.generate("The capital", SamplingParams(max_tokens=2))[0].metrics
    assert (metrics.prefill_joules, metrics.decode_joules) == (None, None)
    energy_log.cache_clear()
