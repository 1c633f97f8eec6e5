"""Quantized checkpoints, compared with golden logits and with the unpacked numbers in NumPy."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quantized_files as files
from conftest import PARITY
from ferrule import LLM, SamplingParams, model_info
from ferrule._loading.quantized import METHODS
from quantized_files import Pack
from test_parity import TOLERANCE, check_parity

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "quantized"
CASES = sorted(path.name for path in GOLDEN.iterdir())
REQUANTIZED_TOLERANCE = 0.03
"""Tolerance, relative to the largest logit: these models are random and narrow, so errors do not average out.
With weights in f32, int8 activations in groups of 32 cause differences of 0.019 to 0.028."""


@pytest.mark.parametrize("case", CASES)
def test_dequantized_logits_equal_reference(case: str, request: pytest.FixtureRequest) -> None:
    check_parity(GOLDEN / case, "f32", request)


@pytest.mark.parametrize("case", CASES)
def test_requantized_logits_are_close_to_reference(case: str, request: pytest.FixtureRequest) -> None:
    with np.load(GOLDEN / case / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected = golden["logits"]
    with LLM(GOLDEN / case, kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)
    distance = float(np.abs(logits.astype(np.float64) - expected).max() / np.abs(expected).max())
    rows = request.config.stash.setdefault(PARITY, [])
    rows.append((case, "auto", distance, bool((logits.argmax(-1) == expected.argmax(-1)).all())))
    assert TOLERANCE < distance <= REQUANTIZED_TOLERANCE


def test_number_of_golden_cases() -> None:
    assert len(CASES) == 9


def gptq(bits: int, group_size: int, **other: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, **other}


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    """Returns a configuration with dynamically quantized activations, as in W8A8."""
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}


FP8 = {"num_bits": 8, "type": "float"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

VARIANTS: dict[str, tuple[str, dict[str, Any], Pack]] = {
    "gptq 2 bits": ("llama", gptq(2, 32), files.gptq(2, 32)),
    "gptq 3 bits": ("llama", gptq(3, 64), files.gptq(3, 64)),
    "gptq 4 bits, by row": ("qwen3", gptq(4, -1, sym=True), files.gptq(4, -1)),
    "gptq 8 bits, order": ("llama", gptq(8, 32, desc_act=True), files.gptq(8, 32, order=True)),
    "gptq 4 bits, second version": (
        "llama",
        gptq(4, 128, checkpoint_format="gptq_v2"),
        files.gptq(4, 128, version=2),
    ),
    # Plain modules of GPT-2 are stored transposed, quantized ones are not; one module is square.
    "gptq of gpt2": ("gpt2", gptq(4, 32, desc_act=True), files.gptq(4, 32, order=True)),
    # All three projections in one matrix, and a mixture of experts with separate matrices.
    "gptq of phi3": ("phi3", gptq(4, 32), files.gptq(4, 32)),
    "awq by row": ("llama", {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"}, files.awq(-1)),
    "awq of phi3": ("phi3", {"quant_method": "awq", "bits": 4, "group_size": 32}, files.awq(32)),
    "int4 by row": (
        "llama",
        compressed("pack-quantized", num_bits=4, strategy="channel"),
        files.compressed_words(4, None),
    ),
    "int4 with zero points, act-order": (
        "llama",
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False, actorder="group"),
        files.compressed_words(4, 32, symmetric=False, order=True),
    ),
    "int8 in words": (
        "llama",
        compressed("pack-quantized", num_bits=8, strategy="group", group_size=32),
        files.compressed_words(8, 32),
    ),
    "int8 with zero points": (
        "llama",
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        files.int8(symmetric=False),
    ),
    "int8 by tensor": ("llama", compressed("naive-quantized", num_bits=8, strategy="tensor"), files.int8(whole=True)),
    "float-quantized": (
        "llama",
        compressed("float-quantized", strategy="channel", **FP8),
        files.fp8(None, name="weight_scale"),
    ),
    "float-quantized in blocks": (
        "llama",
        compressed("float-quantized", strategy="block", block_structure=[16, 32], **FP8),
        files.fp8((16, 32), name="weight_scale"),
    ),
    "sparse-bitmask": (
        "llama",
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
        files.sparse(files.floats, two_of_four=False),
    ),
    "sparse-24-bitmask of int8": (
        "llama",
        compressed("int-quantized", num_bits=8, strategy="channel")
        | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        files.sparse(files.int8(), two_of_four=True),
    ),
    "sparse-24-bitmask of fp8": (
        "deepseek_v3",
        compressed("float-quantized", strategy="channel", **FP8) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        files.sparse(files.fp8(None, name="weight_scale"), two_of_four=True),
    ),
    # Latent attention, whose keys are read by column, and a mixture of experts.
    "fp8 of deepseek": (
        "deepseek_v3",
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48]},
        files.fp8((32, 48)),
    ),
    "fp8 by tensor": (
        "llama",
        {"quant_method": "fp8", "activation_scheme": "static"},
        files.fp8(None, whole=True, name="weight_scale"),
    ),
    "fp8 by row": ("llama", {"quant_method": "fbgemm_fp8"}, files.fp8(None, name="weight_scale")),
    "fp8 of five bits of exponent": ("llama", {"quant_method": "fp8", "fmt": "e5m2"}, files.fp8(None, mantissa=2)),
    "nf4 whose scales are quantized": (
        "deepseek_v3",
        {**NF4, "bnb_4bit_use_double_quant": True},
        files.four_bits("nf4", nested=True),
    ),
    "fp4": ("llama", {**NF4, "bnb_4bit_quant_type": "fp4"}, files.four_bits("fp4", nested=False)),
    "nf4 of gpt2": ("gpt2", NF4, files.four_bits("nf4", nested=False)),
    "llm.int8": ("llama", {"load_in_8bit": True, "llm_int8_threshold": 6.0}, files.eight_bits),
}


def check_same(packed: Path, plain: Path, quantization: str) -> None:
    """Checks that both models give bitwise equal, finite logits."""
    ids = list(range(7, 47))
    with LLM(packed, quantization=quantization) as llm, LLM(plain, quantization=quantization) as other:
        logits = llm.logits(ids)
        assert np.isfinite(logits).all()
        assert logits.std() > 0
        assert (logits == other.logits(ids)).all()


@pytest.mark.parametrize("quantization", ["f32", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_unpacked_weights(variant: str, quantization: str, tmp_path: Path) -> None:
    check_same(*files.make(tmp_path, *VARIANTS[variant]), quantization)


@pytest.mark.parametrize("quantization", ["f32", "int8"])
def test_mxfp4_expert_logits_equal_unpacked_weights(quantization: str, tmp_path: Path) -> None:
    check_same(*files.make_mxfp4(tmp_path), quantization)


def test_every_method_has_a_variant() -> None:
    found = {config.get("quant_method", "bitsandbytes") for _, config, _ in VARIANTS.values()}
    assert found | {"mxfp4"} == set(METHODS)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([-1, 16, 24, 32, 64, 1000]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 1 << 32),
)
def test_random_gptq_parameters(bits: int, group_size: int, order: bool, version: int, seed: int) -> None:
    stored_as = gptq(bits, group_size, desc_act=order, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    pack = files.gptq(bits, group_size, order=order, version=version)
    with tempfile.TemporaryDirectory() as folder:
        check_same(*files.make(Path(folder), "llama", stored_as, pack, seed), "f32")


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([4, 8]),
    st.sampled_from([None, 16, 20, 32, 1000]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_random_compressed_tensors_parameters(
    bits: int, group_size: int | None, symmetric: bool, order: bool, seed: int
) -> None:
    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    stored_as = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy)
    pack = files.compressed_words(bits, group_size, symmetric=symmetric, order=order)
    with tempfile.TemporaryDirectory() as folder:
        check_same(*files.make(Path(folder), "llama", stored_as, pack, seed), "f32")


def test_legacy_quantization_config_files(tmp_path: Path) -> None:
    """Old versions of AutoGPTQ and AutoAWQ wrote separate files instead of fields in config.json."""
    for case, name in (("gptq_sym_g32", "quantize_config.json"), ("awq_g32", "quant_config.json")):
        folder = tmp_path / case
        shutil.copytree(GOLDEN / case, folder)
        config = json.loads((folder / "config.json").read_text())
        stored_as = config.pop("quantization_config")
        del stored_as["quant_method"]
        if name == "quant_config.json":
            old = {"w_bit": stored_as["bits"], "q_group_size": stored_as["group_size"], "version": "GEMM"}
            stored_as = {"zero_point": True, **old}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / name).write_text(json.dumps(stored_as))
        with LLM(folder, quantization="f32") as llm, LLM(GOLDEN / case, quantization="f32") as other:
            assert (llm.logits([5, 6, 7]) == other.logits([5, 6, 7])).all()


def test_conversion_is_reported() -> None:
    for quantization, words in (
        ("auto", "kept as stored if kernels support the format, else dequantized and re-quantized"),
        ("int8", "dequantized, then re-quantized as int8"),
        ("bf16", "dequantized, then rounded to bf16"),
        ("f32", "dequantized"),
    ):
        with LLM(GOLDEN / "gptq_asym_actorder", quantization=quantization) as llm:
            info = llm.info()
            assert info["stored_as"] == "GPTQ, 4 bits in groups of 32, act-order"
            assert info["conversion"] == words
    with LLM() as llm:
        assert (llm.info()["stored_as"], llm.info()["conversion"]) == (None, None)


def test_supported_formats_run_as_stored() -> None:
    """An unquantized embedding stays unquantized unless lm_head is tied to it."""
    for case, kept in (
        ("gptq_sym_g32", {"f16", "u4"}),
        ("awq_g32", {"f16", "u4"}),
        ("gptq_8bit_g64", {"f16", "u8"}),
        ("fp8_block", {"bf16", "q8_0"}),
    ):
        info = model_info(GOLDEN / case)
        with LLM(GOLDEN / case) as llm:
            assert info["weight_bytes_by_format"] == llm.info()["weight_bytes_by_format"]
        assert info["quantization"] == "stored"
        assert set(info["weight_bytes_by_format"]) == {"q8_0"} | kept


def test_outputs_are_independent_of_threads() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs: list[list[int]] = []
    for threads in (1, 2, 3):
        with LLM(GOLDEN / "gptq_8bit_g64", threads=threads) as llm:
            outputs.append(llm.generate({"prompt_token_ids": list(range(9, 30))}, greedy)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1] == outputs[2]
