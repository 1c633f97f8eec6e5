"""Logits with an adapter, against what PEFT computed in float64 and against weights with the adapter merged in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from conftest import PARITY
from ferrule import LLM, SamplingParams
from lora_files import ADAPTERS, BASES, linear_modules, merge, random_matrices, write_adapter

pytestmark = pytest.mark.native

CASES = {"llama_qv": "llama", "llama_all": "llama", "phi3": "phi3", "gpt2": "gpt2"}
"""Golden adapters with their base models."""
TOLERANCE = 1e-4
"""Tolerance, relative to the largest logit."""


VARIANTS = BASES.parent / "variants"
OTHER_MIXERS = ("gemma3n", "gemma4_e", "glm_moe_dsa", "kimi_linear", "minimax", "rwkv", "zamba2")
"""Variants with linear layers that no case of `BASES` has."""


def _name(path: Path) -> str:
    return path.name


def distance(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float64]) -> float:
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("quantization", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_peft(case: str, quantization: str, request: pytest.FixtureRequest) -> None:
    """Fused projections, transposed matrices, separate ranks and factors: see tools/make_golden/lora.py."""
    with np.load(ADAPTERS / case / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected, greedy = golden["logits"], golden["greedy"].tolist()
    with LLM(
        BASES / CASES[case], quantization=quantization, kv_cache_dtype="f32", lora_modules={case: ADAPTERS / case}
    ) as llm:
        logits = llm.logits(ids, lora_request=case)
        params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
        output = llm.generate({"prompt_token_ids": ids}, params, lora_request=case)[0]
        continuation = output.outputs[0].token_ids
        assert distance(llm.logits(ids), expected) > 100 * TOLERANCE
    rows = request.config.stash.setdefault(PARITY, [])
    rows.append((f"lora {case}", quantization, distance(logits, expected), continuation == greedy))
    assert distance(logits, expected) <= TOLERANCE
    assert continuation == greedy


def test_every_golden_adapter_is_tested() -> None:
    assert {path.name for path in ADAPTERS.iterdir()} == CASES.keys()


@pytest.mark.parametrize("base", [*sorted(BASES.iterdir()), *(VARIANTS / name for name in OTHER_MIXERS)], ids=_name)
def test_logits_equal_merged_weights(base: Path, tmp_path: Path) -> None:
    """For every linear layer of every family, the adapter has the same effect as merging it into the weights."""
    matrices = random_matrices(base, linear_modules(base), rank=3, seed=1)
    adapter = write_adapter(tmp_path / "adapter", matrices, rank=3, alpha=0.3)
    with np.load(base / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
    with LLM(base, quantization="f32", kv_cache_dtype="f32", lora_modules={"a": adapter}) as llm:
        without, found = llm.logits(ids), llm.logits(ids, lora_request="a")
        assert llm.lora_adapters()[0].rank == 3
    with LLM(merge(base, matrices, 0.1, tmp_path / "merged"), quantization="f32", kv_cache_dtype="f32") as llm:
        expected = llm.logits(ids).astype(np.float64)
    assert distance(found, expected) <= TOLERANCE
    assert distance(without, expected) > 100 * TOLERANCE
