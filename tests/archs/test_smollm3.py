"""SmolLM3: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, heads, rotated, spec_of, windows
from ferrule.archs.spec import LmHead

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 3"),
    (
        "smollm3",
        {"no_rope_layers": [1, 2, 0]},
        "no_rope_layers must be a list of integers from 0",
    ),
    ("smollm3", {"no_rope_layers": [True, 1, 0]}, "no_rope_layers must be a list of integers"),
    ("smollm3", {"no_rope_layers": 1}, "no_rope_layers must be a list of integers from 0 to 1, got 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_smollm3_layers_without_rotary_embedding() -> None:
    old = {"no_rope_layers": LEFT_OUT, "layer_types": LEFT_OUT, "num_hidden_layers": 5}
    assert rotated(spec_of("smollm3", **old)) == [True, True, True, False, True]
    assert rotated(spec_of("smollm3", **old, no_rope_layer_interval=2)) == [True, False, True, False, True]
    assert windows(spec_of("smollm3", **old, sliding_window=8)) == [None] * 5
    switched = spec_of("smollm3", **old, sliding_window=8, use_sliding_window=True)
    assert windows(switched) == [None, None, None, 8, None]
    bare = spec_of("smollm3", tie_word_embeddings=LEFT_OUT, rope_parameters=LEFT_OUT, num_key_value_heads=LEFT_OUT)
    assert (bare.lm_head, bare.ropes[0].theta, heads(bare).kv_heads) == (LmHead(tied=True), 2e6, 4)
