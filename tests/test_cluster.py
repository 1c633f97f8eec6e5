"""The simulation of several machines (`benches/cluster.py`) against cases with known answers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parent.parent / "benches" / "cluster.py"
POINTS = [
    {"batch": batch, "prefill_tokens": 512, "decode_step_seconds": step, "prefill_seconds_per_token": 0.004}
    for batch, step in ((16, 0.05), (1, 0.02), (4, 0.026))
]


@pytest.fixture(scope="module")
def cluster() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster_bench", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def traffic(cluster: ModuleType, **changes: float) -> object:
    given = {"rate": 0.5, "conversations": 200, "turns": 1, "prompt": 512, "output": 128, "pause": 10.0}
    return cluster.Traffic(**given | changes)


@pytest.mark.parametrize(
    ("sequences", "seconds"), [(0, 0.0), (1, 0.02), (2, 0.022), (4, 0.026), (10, 0.038), (16, 0.05), (32, 0.1)]
)
def test_steps_are_interpolated(cluster: ModuleType, sequences: int, seconds: float) -> None:
    assert cluster.Speed.from_record({"points": POINTS}).decode(sequences) == pytest.approx(seconds)


def test_record_of_one_point_is_read(cluster: ModuleType) -> None:
    speed = cluster.Speed.from_record(POINTS[1])
    assert (speed.decode(1), speed.decode(3), speed.prefill) == (0.02, pytest.approx(0.06), 0.004)


def test_single_request_takes_the_times_of_the_record(cluster: ModuleType) -> None:
    speed = cluster.Speed.from_record({"points": POINTS})
    figures = cluster.Cluster(speed, 1, traffic(cluster, conversations=1)).run()
    assert figures["time_to_first_token_p50"] == pytest.approx(512 * 0.004)
    assert figures["inter_token_latency_p99"] == pytest.approx(0.02)


def test_saturated_machine_reaches_the_throughput_of_its_largest_batch(cluster: ModuleType) -> None:
    speed = cluster.Speed.from_record({"points": POINTS})
    full = traffic(cluster, rate=1e6, conversations=16 * 20, prompt=1, output=400)
    figures = cluster.Cluster(speed, 1, full, max_num_seqs=16).run()
    assert figures["output_tokens_per_second"] == pytest.approx(16 / 0.05, rel=0.01)
    assert figures["busy_share"] == pytest.approx(1.0, abs=0.01)


def test_machines_share_the_requests(cluster: ModuleType) -> None:
    speed = cluster.Speed.from_record({"points": POINTS})
    full = traffic(cluster, rate=1e6, conversations=320)
    one, four = (cluster.Cluster(speed, machines, full).run() for machines in (1, 4))
    assert four["requests_per_second"] == pytest.approx(4 * one["requests_per_second"], rel=0.05)


@pytest.mark.parametrize("machines", [1, 4])
def test_routing_by_prefix_finds_every_prefix(cluster: ModuleType, machines: int) -> None:
    speed = cluster.Speed.from_record({"points": POINTS})
    talk = traffic(cluster, turns=8, rate=0.1, conversations=50)
    figures = cluster.Cluster(speed, machines, talk, by_prefix=True).run()
    past = sum(turn * (512 + 128) for turn in range(8))
    assert figures["prefix_cache_hit_rate"] == pytest.approx(past / (past + 8 * 512))
    if machines > 1:
        assert cluster.Cluster(speed, machines, talk).run()["prefix_cache_hit_rate"] < 0.5


def test_same_seed_gives_the_same_figures(cluster: ModuleType) -> None:
    speed = cluster.Speed.from_record({"points": POINTS})
    first, second = (cluster.Cluster(speed, 3, traffic(cluster), seed=7).run() for _ in range(2))
    assert first == second
