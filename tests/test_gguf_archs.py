"""GGUF files of many architectures, written like llama.cpp's converters do, compared with transformers' results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ferrule import LLM, SamplingParams
from gguf_convert import convert
from test_encoders import GOLDEN as ENCODERS
from test_encoders import far, read

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-4
"""Tolerance, relative to the largest logit."""

CASES = [
    *("llama", "llama3_rope", "llama_linear", "llama_tied", "llama_yarn", "mixtral", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "gemma", "gemma2", "gemma3", "phi", "phi3", "phi3_longrope", "gpt2", "gpt_neox", "gpt_bigcode"),
    *("bloom", "mpt", "falcon", "stablelm", "starcoder2", "olmo", "olmo2", "olmoe", "cohere", "cohere2", "glm4"),
    *("granite", "gpt_oss", "deepseek_v3"),
]

VARIANTS = [
    *("arcee", "bloom_6_heads", "deepseek_v2_lite", "deepseek_v3_yarn", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone4_no_window", "exaone_moe", "falcon_11b", "falcon_40b", "gemma2_caps"),
    *("gemma3_linear_rope", "glm", "glm4_moe", "glm4_no_bias", "gpt_neox_serial"),
    *("granite_tied", "granitemoe", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "llama_bias"),
    *("minicpm3", "minimax_m2", "mistral_no_window", "mpt_6_heads", "mpt_clip", "nemotron", "olmo2_bias", "olmo3"),
    *("olmo_clip", "phi4_mini", "phi4_mini_short", "seed_oss", "stablelm_parallel", "youtu"),
]


@pytest.mark.parametrize("case", VARIANTS)
def test_variants_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "variants" / case, tmp_path)


@pytest.mark.parametrize("case", ["deepseek_v2_lite", "deepseek_v3_yarn", "youtu"])
def test_unsplit_latent_projections_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "variants" / case, tmp_path, split_latent=False)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "logits" / case, tmp_path)


def check(directory: Path, tmp_path: Path, *, split_latent: bool = True) -> None:
    file = convert(directory, tmp_path / "model.gguf", split_latent=split_latent)
    with np.load(directory / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected, greedy = golden["logits"], golden["greedy"].tolist()
    with LLM(file, quantization="f32", kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)
        params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
        continuation = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
    distance = float(np.abs(logits.astype(np.float64) - expected).max() / np.abs(expected).max())
    assert distance <= TOLERANCE
    assert continuation == greedy


@pytest.mark.parametrize("case", ["bert", "gemma3", "qwen3"])
def test_encoders_equal_transformers(case: str, tmp_path: Path) -> None:
    golden, texts = read(case)
    with LLM(convert(ENCODERS / case, tmp_path / "model.gguf"), quantization="f32", kv_cache_dtype="f32") as llm:
        for number, output in enumerate(llm.embed(texts, pooling="none")):
            assert far(output.outputs.embedding, golden[f"last_hidden_state_{number}"]) <= TOLERANCE
        if case == "bert":  # the file specifies mean pooling
            outputs = llm.embed(texts)
            assert far(np.stack([output.outputs.embedding for output in outputs]), golden["mean"]) <= TOLERANCE
