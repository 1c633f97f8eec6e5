"""OLMo, OLMo 3 and FlexOlmo: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, ropes, spec_of, windows
from ferrule.archs.spec import NoScaling, YarnScaling

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmo", {"clip_qkv": 0}, "clip_qkv must be a finite number above 0"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_olmo3_scales_rope_of_full_attention_layers_only() -> None:
    for spec in (spec_of("olmo3"), spec_of("olmo3", layer_types=LEFT_OUT)):
        assert windows(spec) == [16, 16, 16, None]
        kinds = [type(rope.scaling) for rope in ropes(spec) if rope is not None]
        assert kinds == [NoScaling, NoScaling, NoScaling, YarnScaling]
        assert {rope.theta for rope in ropes(spec) if rope is not None} == {500_000}
