"""Records of runs: figures under fixed names, which `ferrule bench --json` prints.

Times are in seconds and sizes in bytes. Rates are per second; `gbps`, `gops`, `gflops` and `add_probe` are divided by
10^9. Each figure is the median over the runs. Each fraction is the median over the runs of the fraction that a run
reaches of the ceilings measured directly before and after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ferrule._bench.machine import Ceilings, Machine, median
from ferrule._bench.measure import Point, Run, good

Record: TypeAlias = dict[str, Any]

FLOAT_FORMATS = ("f32", "bf16", "f16")
"""Formats with matmuls in f32; other formats have matmuls in int8."""

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "max": 1.0}


def model_record(info: Mapping[str, Any], runs: Mapping[Point, Sequence[Run]], machine: Machine, repeat: int) -> Record:
    """Returns the record of a model: properties, figures of the first point, and `points` if there are several."""
    points = [_point_record(info, point, taken, machine, repeat) for point, taken in runs.items()]
    record: Record = {
        "model": info["model"],
        "format": info["quantization"],
        "isa": info["isa"],
        "threads": info["threads"],
        "weight_bytes": info["weight_bytes"],
        "kv_cache_dtype": info["kv_cache_dtype"],
        "weight_bytes_per_token": info["weight_bytes_per_token"],
        "kv_windows": info["kv_windows"],
        "state_bytes": info["state_bytes"],
        "layer_parameters_per_token": info["layer_parameters_per_token"],
        "repeat": repeat,
        **points[0],
    }
    return record if len(points) == 1 else {**record, "points": points}


def machine_record(machine: Machine, isa: str, threads: int, rounds: Mapping[int, Sequence[Ceilings]]) -> Record:
    """Returns the record of the machine: ceilings and their scaling, from the rounds for each number of threads."""
    good_rounds = {
        count: [each for each in taken if not machine.is_bad(each, alone=count == 1)] for count, taken in rounds.items()
    }
    together, single = median(good_rounds[threads]).record(), median(good_rounds[1]).record()
    return {
        "isa": isa,
        "threads": threads,
        "repeat": len(rounds[threads]),
        "rounds_in_bad_windows": sum(len(rounds[count]) - len(kept) for count, kept in good_rounds.items()),
        "read_probe_bytes": machine.read_bytes,
        **together,
        "one_thread": single,
        "scaling": {name: figure / single[name] for name, figure in together.items()},
    }


def _point_record(info: Mapping[str, Any], point: Point, taken: Sequence[Run], machine: Machine, repeat: int) -> Record:
    # If there are too few undisturbed runs, the best disturbed runs are used too, and the record reports their number.
    runs = sorted(taken, key=lambda run: run.ceilings.adds, reverse=True)[:repeat]

    def middle(figure: Callable[[Run], float]) -> float:
        return statistics.median(map(figure, runs))

    # A step must read every weight once, the keys and values of its sequences, and their states, which it also writes.
    weights = info["weight_bytes_per_token"]
    step_bytes = middle(lambda run: weights + sum(_sequence_bytes(info, tokens) for tokens in run.contexts))
    # Number of operations for a prompt token in the layers' projections, without attention and lm_head.
    token_operations = 2 * info["layer_parameters_per_token"]

    def prefill(run: Run) -> float:
        return point.batch * point.context / run.prefill_seconds

    def step(run: Run) -> float:
        return run.decode_seconds / (point.gen - 1)

    return {
        "batch": point.batch,
        "prefill_tokens": point.context,
        "prefill_tokens_per_second": middle(prefill),
        "prefill_seconds_per_token": middle(lambda run: 1 / prefill(run)),
        "time_to_first_token": middle(lambda run: run.first_token_seconds),
        "decode_tokens": point.gen,
        "decode_tokens_per_second": middle(lambda run: point.batch / step(run)),
        "decode_step_seconds": middle(step),
        "decode_step_bytes": step_bytes,
        "decode_step_over_weight_read": middle(lambda run: step(run) / (weights / run.ceilings.read)),
        **_latencies([gap for run in runs for gap in run.gaps]),
        **median([run.ceilings for run in runs]).record(),
        "decode_bandwidth_fraction": middle(lambda run: step_bytes / step(run) / run.ceilings.read),
        "prefill_peak_fraction": middle(lambda run: token_operations * prefill(run) / run.ceilings.int8),
        "prefill_f32_fraction": middle(lambda run: token_operations * prefill(run) / run.ceilings.f32),
        **_energy(point, runs),
        "runs_repeated": len(taken) - len(runs),
        "runs_in_bad_windows": len(runs) - len(good(runs, machine)),
    }


def _energy(point: Point, runs: Sequence[Run]) -> dict[str, float]:
    """Returns joules per token of prefill and decode, each only if it was measured in all runs."""
    prefill = [run.prefill_joules for run in runs if run.prefill_joules is not None]
    decode = [run.decode_joules_per_token for run in runs if run.decode_joules_per_token is not None]
    tokens = point.batch * point.context
    figures = {
        "prefill_joules_per_token": [joules / tokens for joules in prefill],
        "decode_joules_per_token": decode,
    }
    return {name: statistics.median(values) for name, values in figures.items() if len(values) == len(runs)}


def _sequence_bytes(info: Mapping[str, Any], context: float) -> float:
    """Returns the bytes of sequence memory that a token moves.

    It reads the keys and values of its context, in a layer with a window only those of the window; keys and values that
    several layers read count once. It reads the old states and writes the new ones.
    """
    windows = info["kv_windows"]
    kv = sum(group["bytes_per_token"] * min(context, group["window"] or context) for group in windows)
    return kv + 2 * info["state_bytes"]


def _latencies(gaps: Sequence[float]) -> dict[str, float]:
    """Returns percentiles of the time between tokens; a percentile is the lowest value that reaches its share."""
    ordered = sorted(gaps)
    # ceil(share * count) is computed in integers, since 0.99 is not exact in binary.
    ranks = {name: -(-round(share * 100) * len(ordered) // 100) for name, share in PERCENTILES.items()}
    return {f"inter_token_latency_{name}": ordered[rank - 1] for name, rank in ranks.items()}
