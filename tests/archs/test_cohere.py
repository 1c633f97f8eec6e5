"""Cohere and Cohere 2: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, heads, rotated, spec_of, windows
from ferrule.archs.spec import LmHead

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("cohere", {"logit_scale": "big"}, "logit_scale must be a finite number above 0, got 'big'"),
    ("cohere2", {"sliding_window": None}, "sliding_window must be an integer, and enabled"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_cohere_norms() -> None:
    with_norms, without = spec_of("cohere"), spec_of("cohere", use_qk_norm=LEFT_OUT, rope_parameters=LEFT_OUT)
    assert heads(with_norms).qk_norm is not None
    assert (heads(without).qk_norm, without.ropes[0].theta, without.ropes[0].interleaved) == (None, 500_000.0, True)
    assert (without.layers[0].block("ffn").parallel, without.layers[0].block("ffn").norm) == (True, None)
    assert spec_of("cohere", logit_scale=LEFT_OUT).lm_head == LmHead(tied=False, scale=0.0625)
    assert spec_of("cohere", tie_word_embeddings=LEFT_OUT).lm_head == LmHead(tied=True, scale=0.25)


def test_cohere2_full_attention_layers_have_no_rotary_embedding() -> None:
    spec = spec_of("cohere2", layer_types=LEFT_OUT, num_hidden_layers=5)
    assert windows(spec) == [16, 16, 16, None, 16]
    assert rotated(spec) == [True, True, True, False, True]
    assert rotated(spec_of("cohere2", layer_types=LEFT_OUT, sliding_window_pattern=2)) == [True, False, True]
