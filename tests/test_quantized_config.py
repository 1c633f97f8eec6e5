"""Configurations of quantized weights in all formats, and errors for invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ferrule import ConfigError, UnsupportedModelError
from ferrule._loading import read_model_files
from ferrule._loading.quantized import conversion_words, read_stored_as, stored_words
from ferrule.archs.config import Config
from ferrule.archs.spec import (
    Awq,
    BitsAndBytes,
    CompressedTensors,
    CompressedWeights,
    Fp8,
    Gptq,
    Mxfp4,
    StoredAs,
)

NOWHERE = Path("model")

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def stored_as(quantization: object, field: str = "quantization_config") -> StoredAs | None:
    return read_stored_as(Config({field: quantization}, NOWHERE / "config.json"), NOWHERE)


def compressed(weights: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {})}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **other}


READ: list[tuple[dict[str, Any], StoredAs, str]] = [
    (GPTQ, Gptq(4, 128), "GPTQ, 4 bits in groups of 128"),
    (
        GPTQ | {"bits": 8, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2"},
        Gptq(8, None, desc_act=True, zeros_less_one=False),
        "GPTQ, 8 bits by row, act-order",
    ),
    (GPTQ | {"dynamic": {r"-:.*\.mlp\..*": {}}}, Gptq(4, 128), "GPTQ, 4 bits in groups of 128"),
    (AWQ, Awq(128), "AWQ, 4 bits in groups of 128"),
    (AWQ | {"version": "GEMM", "backend": "autoawq"}, Awq(128), "AWQ, 4 bits in groups of 128"),
    (FP8, Fp8((128, 128)), "FP8 in blocks of 128 x 128"),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Fp8(), "FP8 by row"),
    (NF4, BitsAndBytes("nf4"), "bitsandbytes, nf4"),
    ({"load_in_8bit": True, "load_in_4bit": False}, BitsAndBytes("int8"), "bitsandbytes, int8"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Mxfp4(), "MXFP4 in groups of 32"),
    (
        compressed(format="pack-quantized"),
        CompressedTensors((CompressedWeights("int", 4, group_size=128),)),
        "compressed-tensors, 4 bits in groups of 128",
    ),
    (
        compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}),
        CompressedTensors((CompressedWeights("float", 8, block=(128, 64)),)),
        "compressed-tensors, fp8 in blocks of 128 x 64",
    ),
    (
        compressed({"num_bits": 8, "strategy": None, "group_size": None, "symmetric": False}, format="int-quantized"),
        CompressedTensors((CompressedWeights("int", 8, symmetric=False),)),
        "compressed-tensors, 8 bits by row",
    ),
    (
        compressed({"strategy": None, "group_size": -1}, format="mixed-precision"),
        CompressedTensors((CompressedWeights("int", 4),)),
        "compressed-tensors, 4 bits by row",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"cache": {"weights": None}}},
        CompressedTensors(()),
        "compressed-tensors, nothing quantized",
    ),
]


@pytest.mark.parametrize(("quantization", "expected", "words"), READ)
def test_valid_configurations(quantization: dict[str, Any], expected: StoredAs, words: str) -> None:
    found = stored_as(quantization)
    assert found == expected
    assert stored_words(expected) == words


def test_weight_formats_are_listed_once() -> None:
    other = {"targets": ["re:.*down_proj"], "weights": WEIGHTS | {"num_bits": 8}}
    config = compressed()
    config["config_groups"] |= {"again": config["config_groups"]["group_0"], "other": other}
    found = stored_as(config)
    assert isinstance(found, CompressedTensors)
    assert [weights.bits for weights in found.weights] == [4, 8]
    assert stored_words(found) == "compressed-tensors, 4 bits in groups of 128 and 8 bits in groups of 128"


def test_other_locations_of_quantization_config(tmp_path: Path) -> None:
    assert stored_as(compressed(), "compression_config") == stored_as(compressed())
    assert stored_as({"quantization_config": GPTQ}, "text_config") == Gptq(4, 128)
    plain = Config({}, tmp_path / "config.json")
    assert read_stored_as(plain, tmp_path) is None
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 64, "version": "GEMM"}))
    assert read_stored_as(plain, tmp_path) == Awq(64)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 32, "desc_act": True}))
    assert read_stored_as(plain, tmp_path) == Gptq(3, 32, desc_act=True)
    # Files of that name that say something else are not theirs.
    (tmp_path / "quantize_config.json").write_text(json.dumps({"mode": "static"}))
    (tmp_path / "quant_config.json").unlink()
    assert read_stored_as(plain, tmp_path) is None


FAULTS: list[tuple[object, type[ConfigError], str]] = [
    (3, ConfigError, "quantization_config is 3; it must be an object"),
    ({}, ConfigError, "quantization_config.quant_method is missing; it must be a string"),
    (
        {"quant_method": "exl2"},
        UnsupportedModelError,
        "quantization_config.quant_method is 'exl2'; it must be one of gptq, awq, compressed-tensors, fp8, fbgemm_fp8, "
        "bitsandbytes, mxfp4",
    ),
    (GPTQ | {"bits": 5}, UnsupportedModelError, "quantization_config.bits is 5; it must be 2 or 3 or 4 or 8"),
    (GPTQ | {"bits": "4"}, ConfigError, "quantization_config.bits is '4'; it must be a whole number from 1 to 64"),
    (GPTQ | {"group_size": 0}, ConfigError, "group_size is 0; it must be -1, or a whole number from 1 to 268435456"),
    (GPTQ | {"group_size": -2}, ConfigError, "group_size is -2; it must be a whole number from 1"),
    ({"quant_method": "gptq", "bits": 4}, ConfigError, "group_size is missing; it must be a whole number from 1"),
    (GPTQ | {"desc_act": "no"}, ConfigError, "desc_act is 'no'; it must be true or false"),
    (
        GPTQ | {"checkpoint_format": "marlin"},
        UnsupportedModelError,
        "checkpoint_format is 'marlin'; it must be one of gptq, gptq_v2",
    ),
    (GPTQ | {"is_marlin_format": True}, UnsupportedModelError, "is_marlin_format is True; it must be false"),
    (
        GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
        UnsupportedModelError,
        "dynamic.+:.*down.* is {'bits': 8}; it must be a rule that leaves modules out",
    ),
    (AWQ | {"bits": 8}, UnsupportedModelError, "quantization_config.bits is 8; it must be 4"),
    (AWQ | {"version": "gemv"}, UnsupportedModelError, "version is 'gemv'; it must be gemm"),
    (AWQ | {"backend": "llm-awq"}, UnsupportedModelError, "backend is 'llm-awq'; it must be \"autoawq\""),
    (FP8 | {"fmt": "e3m4"}, UnsupportedModelError, "fmt is 'e3m4'; it must be one of e4m3, e5m2"),
    (FP8 | {"weight_block_size": [128]}, ConfigError, "weight_block_size is [128]; it must be a list of two whole"),
    (FP8 | {"weight_block_size": [0, 1]}, ConfigError, "weight_block_size is [0, 1]; it must be a list of two whole"),
    (FP8 | {"weight_block_size": 7}, ConfigError, "weight_block_size is 7; it must be a list of two whole numbers"),
    (NF4 | {"bnb_4bit_quant_type": "int4"}, UnsupportedModelError, "bnb_4bit_quant_type is 'int4'; it must be one of"),
    (NF4 | {"load_in_8bit": True}, ConfigError, "load_in_4bit is True; it must be true, or load_in_8bit must be"),
    ({"quant_method": "bitsandbytes"}, ConfigError, "load_in_4bit is missing; it must be true, or load_in_8bit"),
    (
        compressed(format="nvfp4-pack-quantized"),
        UnsupportedModelError,
        "format is 'nvfp4-pack-quantized'; it must be one of pack-quantized, int-quantized, float-quantized",
    ),
    (
        compressed({"num_bits": 5}),
        UnsupportedModelError,
        "config_groups.group_0.weights.num_bits is 5; it must be 2 or 4 or 8",
    ),
    (compressed({"type": "float"}), UnsupportedModelError, "weights.num_bits is 4; it must be 8"),
    (compressed({"type": "real"}), UnsupportedModelError, "weights.type is 'real'; it must be \"int\""),
    (compressed({"dynamic": True}), UnsupportedModelError, "weights.dynamic is True; it must be false"),
    (
        compressed({"strategy": "tensor_group"}),
        UnsupportedModelError,
        "weights.strategy is 'tensor_group'; it must be one of tensor, channel, group",
    ),
    (compressed({"group_size": None}), ConfigError, "weights.group_size is None; it must be a whole number from 1"),
    (
        compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128"}),
        ConfigError,
        "weights.block_structure is [128]; it must be a list of two whole numbers",
    ),
    (
        compressed({"num_bits": 8, "type": "float", "strategy": "block"}),
        ConfigError,
        "weights.block_structure is missing; it must be a list of two whole numbers, as the strategy is block",
    ),
    (
        compressed(sparsity_config={"format": "sparse-24-bitmask"}),
        UnsupportedModelError,
        "sparsity_config.format is 'sparse-24-bitmask'; it must be \"dense\"",
    ),
    (
        compressed(transform_config={"config_groups": {"R1": {}}}),
        UnsupportedModelError,
        "it must be missing or empty: rotations are not run",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        ConfigError,
        "config_groups.a is 1; it must be an object",
    ),
]


@pytest.mark.parametrize(("quantization", "error", "message"), FAULTS)
def test_invalid_configurations(quantization: object, error: type[ConfigError], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stored_as(quantization)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{NOWHERE / 'config.json'}: ")
    assert message in str(caught.value)


def test_legacy_file_is_named_in_errors(model_with: Callable[..., Path]) -> None:
    folder = model_with(quantize_config=json.dumps({"bits": 7, "group_size": 128}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_files(folder)
    assert str(caught.value).startswith(f"{folder / 'quantize_config.json'}: bits is 7; it must be 2 or 3")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("f32", "dequantized"),
        ("f16", "dequantized, then rounded to f16"),
        ("int4", "dequantized, then re-quantized as int4"),
    ],
)
def test_conversion_words(quantization: str, words: str) -> None:
    assert conversion_words(Mxfp4(), quantization) == words
    assert conversion_words(None, quantization) is None
