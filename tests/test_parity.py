"""Logits and greedy continuations against what transformers computed in float64 (golden/logits)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import PARITY
from ferrule import LLM, SamplingParams

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
CASES = sorted(path.name for path in GOLDEN.iterdir())
TOLERANCE = 1e-4
"""Of the largest logit."""


@pytest.mark.parametrize("quantization", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case: str, quantization: str, request: pytest.FixtureRequest) -> None:
    """The golden weights are exact in bf16, so both formats must agree with the same figures."""
    with np.load(GOLDEN / case / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected, greedy = golden["logits"], golden["greedy"].tolist()
    with LLM(GOLDEN / case, quantization=quantization, kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)
        params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
        continuation = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
    assert logits.shape == expected.shape
    distance = float(np.abs(logits.astype(np.float64) - expected).max() / np.abs(expected).max())
    rows = request.config.stash.setdefault(PARITY, [])
    rows.append((case, quantization, distance, continuation == greedy))
    assert distance <= TOLERANCE
    assert continuation == greedy


def test_every_case_is_here() -> None:
    assert CASES == [
        "llama",
        "llama3_rope",
        "llama_dynamic",
        "llama_linear",
        "llama_tied",
        "llama_yarn",
        "mistral_swa",
        "qwen2",
        "qwen3",
    ]
