"""Hidden states, embeddings and scores against what transformers computed in float64 (golden/encoders)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ferrule import LLM, model_info
from ferrule._engine.encoding.texts import TextInput
from ferrule._loading import read_model_files

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "encoders"
CASES = sorted(path.name for path in GOLDEN.iterdir())
CLASSIFIERS = [case for case in CASES if "classifier" in case]
TOLERANCE = 1e-4
"""Tolerances relative to the largest hidden state, to 1 for unit vectors, and to the largest score."""
INT8_COSINE = 0.99
"""Minimum cosine of an int8 embedding with the exact one; random weights lose more than trained ones."""
TEXTS = 3


def read(case: str) -> tuple[dict[str, npt.NDArray[Any]], list[TextInput]]:
    """Returns the golden figures and their texts."""
    with np.load(GOLDEN / case / "golden.npz") as file:
        golden = dict(file)
    texts: list[TextInput] = []
    for text in range(TEXTS):
        ids = golden[f"input_ids_{text}"].tolist()
        kinds = golden.get(f"token_type_ids_{text}")
        if kinds is None:
            texts.append({"prompt_token_ids": ids})
        else:
            texts.append({"prompt_token_ids": ids, "token_type_ids": kinds.tolist()})
    return golden, texts


def far(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("quantization", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_encoder_outputs_equal_transformers(case: str, quantization: str) -> None:
    """The golden weights are exact in bf16, so both formats must agree with the same figures."""
    golden, texts = read(case)
    with LLM(GOLDEN / case, quantization=quantization, kv_cache_dtype="f32") as llm:
        for number, output in enumerate(llm.embed(texts, pooling="none")):
            assert far(output.outputs.embedding, golden[f"last_hidden_state_{number}"]) <= TOLERANCE
            assert output.prompt_token_ids == golden[f"input_ids_{number}"].tolist()
        if "embedding" in golden:
            embeddings = np.stack([output.outputs.embedding for output in llm.embed(texts)])
            assert far(embeddings, golden["embedding"]) <= TOLERANCE
        if not (GOLDEN / case / "2_Dense").exists():
            for pooling, figures in (("cls", "cls"), ("mean", "mean"), ("last", "lasttoken")):
                outputs = llm.embed(texts, pooling=pooling, normalize=True)
                assert far(np.stack([output.outputs.embedding for output in outputs]), golden[figures]) <= TOLERANCE
        if "logits" in golden:
            logits = np.stack([output.outputs.logits for output in llm.classify(texts)])
            assert far(logits, golden["logits"]) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_int8_embeddings_are_close_to_f32(case: str) -> None:
    _, texts = read(case)
    with LLM(GOLDEN / case, quantization="f32") as llm:
        exact = llm.embed(texts, pooling="mean", normalize=True)
    with LLM(GOLDEN / case, quantization="int8") as llm:
        near = llm.embed(texts, pooling="mean", normalize=True)
    cosines = [float(a.outputs.embedding @ b.outputs.embedding) for a, b in zip(exact, near, strict=True)]
    assert INT8_COSINE < min(cosines) < 1 - 1e-7


@pytest.mark.parametrize("case", CASES)
def test_auto_is_bf16_for_bidirectional_models(case: str) -> None:
    causal = read_model_files(GOLDEN / case).spec.causal
    assert model_info(GOLDEN / case)["quantization"] == ("int8" if causal else "bf16")


def test_number_of_golden_cases() -> None:
    assert len(CASES) == 10
    assert len(CLASSIFIERS) == 5
