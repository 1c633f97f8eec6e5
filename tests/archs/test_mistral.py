"""Mistral, Ministral and Mixtral: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, last_experts, spec_of, windows
from ferrule.archs.spec import Dense, Experts, RmsNorm, Router

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_mixtral_defaults() -> None:
    fields = ("num_local_experts", "num_experts_per_tok", "rms_norm_eps")
    spec = spec_of("mixtral", rope_parameters=LEFT_OUT, **dict.fromkeys(fields, LEFT_OUT))
    assert last_experts(spec) == Experts(8, 2, Dense(160), Router(normalize=True))
    assert (spec.final_norm, spec.ropes[0].theta, windows(spec)) == (RmsNorm(1e-5), 1e6, [None] * 3)
    assert windows(spec_of("mixtral", sliding_window=8)) == [8, 8, 8]
    assert last_experts(spec_of("mixtral", num_local_experts=LEFT_OUT, num_experts=5)).experts == 5


def test_ministral_has_windows_without_layer_types() -> None:
    assert windows(spec_of("ministral")) == [None, 16]
    assert windows(spec_of("ministral", layer_types=LEFT_OUT)) == [16, 16]
    assert windows(spec_of("ministral", layer_types=LEFT_OUT, sliding_window=None)) == [None, None]
