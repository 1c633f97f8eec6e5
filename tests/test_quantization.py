"""Size and loss of quantized weights, relative to the same model in f32."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import TINY
from ferrule import LLM, InvalidParameterError, SamplingParams, _native
from ferrule._loading import read_model_files
from ferrule._params.options import QUANTIZATIONS, EngineOptions
from test_parity import usual_distance

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
CASES = sorted(path.name for path in GOLDEN.iterdir())
FARTHEST = {"int8": 0.09, "int4": 0.6}
"""Maximum difference from the golden logits, relative to the largest logit: twice the measured value. These models are
random and 64 wide, so errors do not average out."""
DIVERGENCES = {"int8": 0.0010, "int4": 0.0065}
"""Mean KL divergence of the embedded model from itself in f32; the study found 0.00056 and 0.0055 (benches/quality)."""
WINDOW = 256


def test_quantization_names_match_engine() -> None:
    spec = read_model_files(TINY).spec.to_json()
    options = json.loads(EngineOptions().to_json()) | {"quantization": "int6"}
    with pytest.raises(
        InvalidParameterError, match=f"quantization must be one of {', '.join(QUANTIZATIONS)}, got 'int6'$"
    ):
        _native.Engine(spec, None, json.dumps(options))


def test_auto_quantization_is_int8() -> None:
    prompt = list(range(7, 40))
    with LLM() as llm, LLM(quantization="int8") as other:
        assert llm.info()["quantization"] == "int8"
        assert llm.info()["kv_cache_dtype"] == "f16"
        assert (llm.logits(prompt) == other.logits(prompt)).all()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("quantization", "most"),
    [("int4", 3_514_368), ("int8", 6_127_616), ("bf16", 11_534_336)],
)
def test_weight_bytes_of_embedded_model(quantization: str, most: int, load_format: str) -> None:
    """Checks that int4 and int8 need at most the bytes of llama.cpp's Q4_0 and Q8_0, and bf16 two bytes per weight."""
    with LLM(quantization=quantization, load_format=load_format) as llm:
        info = llm.info()
    assert info["quantization"] == quantization
    assert 0.9 * most < info["weight_bytes"] <= most
    assert info["weight_bytes_per_token"] == info["weight_bytes"], "lm_head is tied to the embedding"


@pytest.mark.parametrize("quantization", FARTHEST)
@pytest.mark.parametrize("case", CASES)
def test_quantized_logits_are_close_to_golden(case: str, quantization: str) -> None:
    with np.load(GOLDEN / case / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected = golden["logits"]
    with LLM(GOLDEN / case, quantization=quantization, kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)
    assert 1e-4 < usual_distance(logits, expected, case) <= FARTHEST[quantization]


def log_probabilities(llm: LLM, windows: list[list[int]]) -> NDArray[np.float64]:
    """Scores the second half of each window, so that each position has context."""
    logits = np.concatenate([llm.logits(window)[WINDOW // 2 :] for window in windows]).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("quantization", DIVERGENCES)
def test_divergence_of_quantized_embedded_model(quantization: str) -> None:
    """Measures the divergence on a file that was excluded from training."""
    with LLM(quantization="f32") as llm:
        ids = llm.tokenize(Path(textwrap.__file__).read_text())[1:]
        windows = [ids[start : start + WINDOW] for start in range(0, len(ids) // WINDOW * WINDOW, WINDOW)]
        assert len(windows) >= 16
        reference = log_probabilities(llm, windows)
    with LLM(quantization=quantization) as llm:
        found = log_probabilities(llm, windows)
    divergence = float((np.exp(reference) * (reference - found)).sum(axis=-1).mean())
    assert 1e-5 < divergence < DIVERGENCES[quantization]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_model_answers_readme_example(quantization: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(quantization=quantization) as llm:
        assert llm.generate("The capital of France is", greedy)[0].outputs[0].text.startswith(" Paris")
