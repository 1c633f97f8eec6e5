"""Results of a comparison: medians, shares of the ceilings and ratios, as a table and as a record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adapters.interface import Loaded, Timing

STEADY = 0.85
"""Share of the highest rate of integer additions below which the machine was disturbed, and so was the round.

As in `ferrule._bench.machine`, which cannot be imported here: compare.py also runs on a Python without ferrule.
"""


@dataclass(frozen=True)
class Ceilings:
    """Throughput of the machine just before a measurement, per second."""

    read: float
    """Bytes."""
    int8: float
    """Number of int8 operations; a multiply-add counts as two."""
    f32: float
    adds: float


@dataclass(frozen=True)
class Measurement:
    """Measurement of a contender, and the ceilings before it."""

    timing: Timing
    ceilings: Ceilings


Round = Sequence[Measurement]
"""One measurement of each contender; the others are compared with the first one."""


@dataclass(frozen=True)
class Workload:
    """Workload of all contenders."""

    model: str
    """Name of a shape, or of a GGUF file."""
    layer_parameters: int
    """Number of weights of the layers' projections; each needs a multiply-add per prompt token."""
    prompt: int
    gen: int
    threads: int
    batch: int
    """Number of concurrent sequences."""


@dataclass(frozen=True)
class Row:
    """Medians of a contender."""

    contender: str
    version: str
    total_bytes: int
    prefill_tokens_per_second: float
    prefill_peak_fraction: float
    """Share of the int8 peak."""
    prefill_ratio: float
    """Median over the rounds of the first contender's speed divided by this one's."""
    decode_tokens_per_second: float
    decode_bandwidth_fraction: float
    """Bytes that the steps must read (the weights once per step) relative to the read bandwidth."""
    decode_ratio: float
    total_tokens_per_second: float
    """Number of generated tokens divided by the total time."""
    total_ratio: float


def steady_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Returns the rounds in which the machine was not disturbed."""
    most = max((each.ceilings.adds for single in rounds for each in single), default=0.0)
    return [single for single in rounds if min(each.ceilings.adds for each in single) >= STEADY * most]


def median_ceilings(rounds: Sequence[Round]) -> Ceilings:
    """Returns the medians over all measurements."""
    every = [each.ceilings for single in rounds for each in single]
    return Ceilings(
        read=statistics.median(each.read for each in every),
        int8=statistics.median(each.int8 for each in every),
        f32=statistics.median(each.f32 for each in every),
        adds=statistics.median(each.adds for each in every),
    )


def rows(workload: Workload, contenders: Sequence[tuple[str, Loaded]], rounds: Sequence[Round]) -> list[Row]:
    """Returns the medians of each contender."""

    def prefill(each: Measurement) -> float:
        return workload.batch * workload.prompt / each.timing.prefill_seconds

    def decode(each: Measurement) -> float:
        return each.timing.decode_tokens / each.timing.decode_seconds

    def total(each: Measurement) -> float:
        timing = each.timing
        return (timing.decode_tokens + workload.batch) / (timing.prefill_seconds + timing.decode_seconds)

    made: list[Row] = []
    for index, (name, loaded) in enumerate(contenders):
        own = [single[index] for single in rounds]
        # Keys and values are those of a context that grows during the run.
        context_bytes = loaded.kv_bytes_per_token * (workload.prompt + workload.gen / 2)
        token_bytes = loaded.token_bytes / workload.batch + context_bytes
        token_operations = 2 * workload.layer_parameters
        made.append(
            Row(
                contender=name,
                version=loaded.version,
                total_bytes=loaded.total_bytes,
                prefill_tokens_per_second=statistics.median(map(prefill, own)),
                prefill_peak_fraction=statistics.median(
                    prefill(each) * token_operations / each.ceilings.int8 for each in own
                ),
                prefill_ratio=_ratio(prefill, rounds, index),
                decode_tokens_per_second=statistics.median(map(decode, own)),
                decode_bandwidth_fraction=statistics.median(
                    decode(each) * token_bytes / each.ceilings.read for each in own
                ),
                decode_ratio=_ratio(decode, rounds, index),
                total_tokens_per_second=statistics.median(map(total, own)),
                total_ratio=_ratio(total, rounds, index),
            )
        )
    return made


def _ratio(speed: Callable[[Measurement], float], rounds: Sequence[Round], index: int) -> float:
    return statistics.median(speed(single[0]) / speed(single[index]) for single in rounds)


def table(made: Sequence[Row]) -> str:
    """Returns a Markdown table; ratios are the speed of the first contender divided by that of the others."""
    first = made[0].contender
    lines = [
        f"| | weights, MB | prefill, tokens/s | of the int8 peak | {first} is | decode, tokens/s "
        f"| of the read bandwidth | {first} is | in all, tokens/s | {first} is |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in made:
        ratios = ["" if row is made[0] else f"{r:.2f}x" for r in (row.prefill_ratio, row.decode_ratio, row.total_ratio)]
        lines.append(
            f"| {row.contender} | {row.total_bytes / 1e6:.0f} "
            f"| {row.prefill_tokens_per_second:.1f} | {row.prefill_peak_fraction:.0%} | {ratios[0]} "
            f"| {row.decode_tokens_per_second:.1f} | {row.decode_bandwidth_fraction:.0%} | {ratios[1]} "
            f"| {row.total_tokens_per_second:.1f} | {ratios[2]} |"
        )
    return "\n".join(lines)


def record(
    command: str, workload: Workload, made: Sequence[Row], rounds: Sequence[Round], steady: Sequence[Round]
) -> dict[str, Any]:
    """Returns the record for benches/record/: command, medians, and each measurement."""
    ceilings = median_ceilings(steady)
    return {
        "command": command,
        **asdict(workload),
        "rounds_run": len(rounds),
        "rounds_counted": len(steady),
        "read_gbps": ceilings.read / 1e9,
        "int8_gops": ceilings.int8 / 1e9,
        "f32_gflops": ceilings.f32 / 1e9,
        "add_probe": ceilings.adds / 1e9,
        "contenders": [asdict(row) for row in made],
        "rounds": [[asdict(each) for each in single] for single in rounds],
    }
