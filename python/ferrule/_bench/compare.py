"""Comparison of a record with an earlier record: differing conditions, and the ratio of each figure."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ferrule._bench.record import Record
from ferrule.errors import InvalidParameterError

CONDITIONS = (
    "model",
    "format",
    "kv_cache_dtype",
    "isa",
    "threads",
    "weight_bytes",
    "decode_tokens",
    "read_probe_bytes",
)
"""Conditions that must be equal for a comparison."""

MACHINE_POINTS = ("all threads", "one thread", "scaling")
"""Kinds of figures in a record of the machine."""

NOT_COMPARED = (
    *CONDITIONS,
    *("batch", "prefill_tokens", "weight_bytes_per_token", "layer_parameters_per_token", "state_bytes"),
    *("repeat", "runs_repeated", "runs_in_bad_windows", "rounds_in_bad_windows", "decode_step_bytes"),
    # These are reciprocals of figures that are compared.
    *("prefill_seconds_per_token", "decode_step_seconds"),
)


@dataclass(frozen=True)
class Change:
    """Old and new value of a figure."""

    point: str
    """Label of the point of a sweep, or of the number of threads; empty if there is only one."""
    figure: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        """Ratio of the new figure to the old one."""
        return self.new / self.old


@dataclass(frozen=True)
class Comparison:
    """Differences between two records."""

    differs: dict[str, tuple[Any, Any]]
    """Conditions that differ, with old and new value."""
    changes: list[Change]

    def record(self) -> Record:
        """Returns the comparison as JSON values."""
        differs = {name: {"old": old, "new": new} for name, (old, new) in self.differs.items()}
        changes = [
            {"point": c.point, "figure": c.figure, "old": c.old, "new": c.new, "ratio": c.ratio} for c in self.changes
        ]
        return {"differs": differs, "changes": changes}


def read_record(path: Path, points: Collection[str]) -> Record:
    """Reads a record of `ferrule bench --json`; it must have at least one of the `points`, by `point_name`.

    Raises InvalidParameterError.
    """
    try:
        record: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError("compare", str(path), f"a readable file ({error.strerror})") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise InvalidParameterError("compare", str(path), f"a file of valid JSON ({error})") from error
    found = _points(cast("Record", record)) if isinstance(record, dict) else {}
    if not found:
        raise InvalidParameterError("compare", str(path), "a record that ferrule bench --json wrote")
    if not found.keys() & points:
        raise InvalidParameterError(
            "compare", str(path), f"a record of {', '.join(points)} (this one is of {', '.join(found)})"
        )
    return cast("Record", record)


def point_name(batch: int, context: int) -> str:
    """Returns the name of a point of a model."""
    return f"{batch} x {context} tokens"


def compare(old: Record, new: Record) -> Comparison:
    """Compares the figures of the points that both records have."""
    before, after = _points(old), _points(new)
    common = [point for point in after if point in before]
    several = len(after) > 1
    changes = [
        Change(point if several else "", figure, before[point][figure], value)
        for point in common
        for figure, value in after[point].items()
        if before[point].get(figure)
    ]
    differs = {
        name: (old.get(name), new.get(name)) for name in CONDITIONS if name in new and old.get(name) != new[name]
    }
    return Comparison(differs, changes)


def _points(record: Record) -> dict[str, dict[str, float]]:
    """Returns the figures of a record, by the name of their point."""
    several: dict[str, object] = {}
    if "one_thread" in record:
        parts = (record, record["one_thread"], record.get("scaling"))
        several = dict(zip(MACHINE_POINTS, parts, strict=True))
    else:
        points: object = record.get("points", [record])
        for point in cast("list[object]", points) if isinstance(points, list) else []:
            several[_name(point)] = point
    figures = {name: _figures(point) for name, point in several.items()}
    return {name: values for name, values in figures.items() if values}


def _name(point: object) -> str:
    values = cast("Record", point) if isinstance(point, dict) else {}
    return point_name(values.get("batch", 1), values.get("prefill_tokens", 0))


def _figures(point: object) -> dict[str, float]:
    values = cast("Record", point) if isinstance(point, dict) else {}
    return {
        name: value
        for name, value in values.items()
        if name not in NOT_COMPARED and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
