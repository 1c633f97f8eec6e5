"""Checkpoints that are quantized already: what they hold against NumPy's reading of it, and golden logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import PARITY
from ferrule import LLM
from test_parity import check_parity

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "quantized"
CASES = sorted(path.name for path in GOLDEN.iterdir())
AUTO_TOLERANCE = 3e-2
"""Of the largest logit."""


@pytest.mark.parametrize("case", CASES)
def test_dequantized_as_the_reference(case: str, request: pytest.FixtureRequest) -> None:
    check_parity(GOLDEN / case, "f32", request)


@pytest.mark.parametrize("case", CASES)
def test_run_as_the_machine_likes_it(case: str, request: pytest.FixtureRequest) -> None:
    with np.load(GOLDEN / case / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected = golden["logits"]
    with LLM(GOLDEN / case, kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)
    distance = float(np.abs(logits.astype(np.float64) - expected).max() / np.abs(expected).max())
    rows = request.config.stash.setdefault(PARITY, [])
    rows.append((case, "auto", distance, bool((logits.argmax(-1) == expected.argmax(-1)).all())))
    assert 0 < distance <= AUTO_TOLERANCE


def test_every_case_is_here() -> None:
    assert len(CASES) == 9
