"""Logits and greedy continuations against what transformers computed in float64 (golden/logits)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from conftest import PARITY, TINY
from ferrule import LLM, InvalidParameterError, SamplingParams, model_info
from ferrule._text.tokenizer import Tokenizer
from ferrule.archs import REGISTRY
from lora_files import base_tensors

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
CASES = sorted(path.name for path in GOLDEN.iterdir())
VARIANTS = GOLDEN.parent / "variants"
"""Other configurations and families of published checkpoints; tools/make_golden writes them."""
REQUIRED = """
apertus bailing_hybrid bamba bitnet deepseek_v4 exaone_moe_windows falcon_h1 falcon_h1_norm falcon_mamba gemma3n gemma4
gemma4_e gemma4_kv gemma4_moe gemma4_ple glm_moe_dsa granite_swa granitemoe_swa granitemoehybrid granitemoehybrid_dense
granitemoehybrid_rope hy_v3 jamba kimi_linear lfm2 lfm2_moe lfm2_vl lfm3 llama4 mamba mamba2 mimo_v2_flash minimax
minimax_m3 ministral3 mistral3_ministral3 mistral4 nemotron_h olmo_hybrid phimoe qwen3_5 qwen3_5_moe qwen3_5_moe_text
qwen3_5_text qwen3_next qwen3_next_dense qwen4_exp recurrent_gemma rwkv zamba2
"""
"""Variants that must have golden logits for a text of 150 tokens; most architectures of 2026 have no other case."""
OTHERWISE_TESTED = {"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text", "roberta"}
"""Families whose files are read like those of another family with a golden case."""
MIXTURES = [case for case in CASES if "expert" in (GOLDEN / case / "config.json").read_text()]
TOLERANCE = 1e-4
"""Tolerance, relative to the largest logit."""
INT8_CACHE_TOLERANCE = 0.02
"""Tolerance, relative to the largest logit; at most 0.015 was measured: K, V and Q have 7 bits."""
MIXTURES_INT8_CACHE_TOLERANCE = 0.05
"""Tolerance for rows with the right routing decision; they may attend to rows with another one."""
MIXTURES_INT8_CACHE_BEYOND = 0.5
"""Share of rows beyond that tolerance; at most 0.15 was measured."""
MIXTURES_INT8_CACHE_DIVERGENCE = 5e-3
"""Maximum mean divergence over all rows in nats; 0.0015 was measured. For uniform probabilities it is 0.2."""
INT8_CACHE_DIVERGENCE = 1e-3
"""Maximum mean divergence over the positions of the text, in nats."""


@pytest.mark.parametrize("quantization", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, quantization: str, request: pytest.FixtureRequest) -> None:
    """The golden weights are exact in bf16, so both formats must agree with the same figures."""
    check_parity(GOLDEN / case, quantization, request)


@pytest.mark.parametrize("case", sorted(path.name for path in VARIANTS.iterdir()))
def test_variants_equal_transformers(case: str, request: pytest.FixtureRequest) -> None:
    check_parity(VARIANTS / case, "f32", request)


FACTORS = {
    "attention_in_multiplier": 2.0,
    "key_multiplier": 4.0,
    "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 4.0,
    "ssm_multipliers": [2.0, 0.5, 4.0, 0.25, 2.0],
    "ssm_out_multiplier": 0.8 / 2,
    "mlp_multipliers": [2.0, 0.5],
}
"""Factors of Falcon-H1 in place of 1, and of 0.8 on the outputs of its Mamba 2."""


def test_factors_equal_divided_weights(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Falcon-H1 with factors on its projections, and weights divided by them, computes what it did without."""
    case = VARIANTS / "falcon_h1_norm"
    shutil.copyfile(case / "golden.npz", tmp_path / "golden.npz")
    config = json.loads((case / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | FACTORS))
    of_parts = np.repeat([2.0, 0.5, 4.0, 0.25, 2.0], [96, 96, 32, 32, 6])
    divisors = {
        "q_proj.weight": 2,
        "k_proj.weight": 8,
        "v_proj.weight": 2,
        "o_proj.weight": 0.5,
        "in_proj.weight": 4 * of_parts[:, None],
        "out_proj.weight": 0.5,
        "gate_proj.weight": 2,
        "gate_proj.bias": 2,
        "down_proj.weight": 0.5,
        "down_proj.bias": 0.5,
    }
    weights = base_tensors(case)
    divided = {name: array / divisors.get(".".join(name.split(".")[-2:]), 1.0) for name, array in weights.items()}
    save_file({name: array.astype(np.float32) for name, array in divided.items()}, tmp_path / "model.safetensors")
    check_parity(tmp_path, "f32", request)


def check_parity(directory: Path, quantization: str, request: pytest.FixtureRequest) -> None:
    with np.load(directory / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected, greedy = golden["logits"], golden["greedy"].tolist()
        rows_kept = golden["rows"] if "rows" in golden else slice(None)
    with LLM(directory, quantization=quantization, kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)[rows_kept]
        params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
        continuation = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
    assert logits.shape == expected.shape
    distance = float(np.abs(logits.astype(np.float64) - expected).max() / np.abs(expected).max())
    rows = request.config.stash.setdefault(PARITY, [])
    rows.append((directory.name, quantization, distance, continuation == greedy))
    assert distance <= TOLERANCE
    assert continuation == greedy


@pytest.mark.parametrize("case", CASES)
def test_int8_kv_cache_is_close_to_transformers(case: str, request: pytest.FixtureRequest) -> None:
    with np.load(GOLDEN / case / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected = golden["logits"]
    with LLM(GOLDEN / case, quantization="f32", kv_cache_dtype="int8") as llm:
        logits = llm.logits(ids)
    distance = usual_distance(logits, expected, case)
    rows = request.config.stash.setdefault(PARITY, [])
    rows.append((case, "f32, int8 cache", distance, bool((logits.argmax(-1) == expected.argmax(-1)).all())))
    most = MIXTURES_INT8_CACHE_TOLERANCE if case in MIXTURES else INT8_CACHE_TOLERANCE
    assert TOLERANCE < distance <= most
    if case in MIXTURES:
        assert (row_distances(logits, expected) > most).mean() <= MIXTURES_INT8_CACHE_BEYOND
        assert mean_divergence(log_softmax(expected), log_softmax(logits)) <= MIXTURES_INT8_CACHE_DIVERGENCE


def test_int8_kv_cache_divergence() -> None:
    """Tests a trained model, the embedded one, on a text longer than an attention block."""
    ids = Tokenizer(TINY).encode((GOLDEN.parents[2] / "README.md").read_text())[:400]
    with LLM(quantization="f32") as llm:
        exact = log_softmax(llm.logits(ids))
    with LLM(quantization="f32", kv_cache_dtype="int8") as llm:
        near = log_softmax(llm.logits(ids))
    assert 0 < mean_divergence(exact, near) <= INT8_CACHE_DIVERGENCE


def test_dynamic_rope_continues_beyond_the_scaled_length(tmp_path: Path) -> None:
    """As in transformers, whose base for n tokens is theta * (factor * n / original - factor + 1) ^ (d / (d - 2))."""
    ids = [5 + position % 300 for position in range(100)]
    scaled, plain = GOLDEN / "llama_dynamic", tmp_path / "plain"
    message = r"max_model_len \(100\) exceeds the model's scaled context of 64 tokens; dynamic RoPE scaling"
    with pytest.warns(RuntimeWarning, match=message):
        assert model_info(scaled, max_model_len=100)["max_model_len"] == 100
    with pytest.warns(RuntimeWarning, match=message):
        extended = LLM(scaled, quantization="f32", max_model_len=100)
    with extended:
        found = extended.logits(ids)
    with pytest.raises(InvalidParameterError, match="max_model_len must be an integer from 1 to 256"):
        LLM(GOLDEN / "llama", max_model_len=257)
    shutil.copytree(scaled, plain, copy_function=shutil.copyfile)
    config = json.loads((plain / "config.json").read_text())
    base = 10_000 * (2 * 100 / 32 - 1) ** (16 / 14)
    changes = {"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    (plain / "config.json").write_text(json.dumps(config | changes))
    with LLM(plain, quantization="f32") as llm:
        expected = llm.logits(ids)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def usual_distance(logits: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], case: str) -> float:
    """Returns the largest difference relative to the largest logit; for experts, of the closest quarter of rows.

    A router with random weights often has near ties between two experts, so that a tiny change selects another one.
    """
    rows = row_distances(logits, expected)
    return float(np.quantile(rows, 0.25) if case in MIXTURES else rows.max())


def row_distances(logits: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Returns the largest difference in each row, relative to the largest logit of all rows."""
    return np.abs(logits.astype(np.float64) - expected).max(-1) / np.abs(expected).max()


def mean_divergence(exact: npt.NDArray[np.float64], near: npt.NDArray[np.float64]) -> float:
    """Returns the mean KL divergence of rows of log-probabilities, in nats."""
    return float((np.exp(exact) * (exact - near)).sum(-1).mean())


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_required_variants_are_tested() -> None:
    assert len(REQUIRED.split()) == 50
    for case in REQUIRED.split():
        with np.load(VARIANTS / case / "golden.npz") as golden:
            assert golden["input_ids"].shape == (150,), case


def test_every_architecture_has_a_golden_case() -> None:
    assert len(CASES) == 39
    configs = (json.loads(file.read_text()) for file in GOLDEN.parent.glob("*/*/config.json"))
    seen = {config.get("text_config", config)["model_type"] for config in configs}
    assert {each.model_type for each in REGISTRY} - seen == OTHERWISE_TESTED
