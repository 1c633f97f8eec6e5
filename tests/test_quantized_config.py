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
    # A file of that name without the identifying field belongs to another program.
    (tmp_path / "quantize_config.json").write_text(json.dumps({"mode": "static"}))
    (tmp_path / "quant_config.json").unlink()
    assert read_stored_as(plain, tmp_path) is None


FAULTS: list[tuple[object, type[ConfigError], str]] = [
    (3, ConfigError, "quantization_config must be an object, got 3"),
    ({}, ConfigError, "quantization_config.quant_method must be a string, but it is missing"),
    (
        {"quant_method": "exl2"},
        UnsupportedModelError,
        "quantization_config.quant_method must be one of gptq, awq, compressed-tensors, fp8, fbgemm_fp8, "
        "bitsandbytes, mxfp4",
    ),
    (GPTQ | {"bits": 5}, UnsupportedModelError, "quantization_config.bits must be 2 or 3 or 4 or 8, got 5"),
    (GPTQ | {"bits": "4"}, ConfigError, "quantization_config.bits must be an integer from 1 to 64, got '4'"),
    (GPTQ | {"group_size": 0}, ConfigError, "group_size must be -1, or an integer from 1 to 268435456, got 0"),
    (GPTQ | {"group_size": -2}, ConfigError, "group_size must be an integer from 1 to 268435456, got -2"),
    (
        {"quant_method": "gptq", "bits": 4},
        ConfigError,
        "group_size must be an integer from 1 to 268435456, but it is missing",
    ),
    (GPTQ | {"desc_act": "no"}, ConfigError, "desc_act must be true or false, got 'no'"),
    (
        GPTQ | {"checkpoint_format": "marlin"},
        UnsupportedModelError,
        "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'",
    ),
    (GPTQ | {"is_marlin_format": True}, UnsupportedModelError, "is_marlin_format must be false, got True"),
    (
        GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
        UnsupportedModelError,
        "dynamic.+:.*down.* must be a rule that excludes modules",
    ),
    (AWQ | {"bits": 8}, UnsupportedModelError, "quantization_config.bits must be 4, got 8"),
    (AWQ | {"version": "gemv"}, UnsupportedModelError, "version must be gemm, got 'gemv'"),
    (AWQ | {"backend": "llm-awq"}, UnsupportedModelError, "backend must be \"autoawq\", got 'llm-awq'"),
    (FP8 | {"fmt": "e3m4"}, UnsupportedModelError, "fmt must be one of e4m3, e5m2"),
    (FP8 | {"weight_block_size": [128]}, ConfigError, "weight_block_size must be a list of two"),
    (FP8 | {"weight_block_size": [0, 1]}, ConfigError, "weight_block_size must be a list of two"),
    (FP8 | {"weight_block_size": 7}, ConfigError, "weight_block_size must be a list of two integers"),
    (NF4 | {"bnb_4bit_quant_type": "int4"}, UnsupportedModelError, "bnb_4bit_quant_type must be one of"),
    (
        NF4 | {"load_in_8bit": True},
        ConfigError,
        "load_in_4bit must be true if load_in_8bit is false, and false if it is true, got True",
    ),
    ({"quant_method": "bitsandbytes"}, ConfigError, "load_in_4bit must be true if load_in_8bit is false, and"),
    (
        compressed(format="nvfp4-pack-quantized"),
        UnsupportedModelError,
        "format must be one of pack-quantized, int-quantized, float-quantized",
    ),
    (
        compressed({"num_bits": 5}),
        UnsupportedModelError,
        "config_groups.group_0.weights.num_bits must be 2 or 4 or 8, got 5",
    ),
    (compressed({"type": "float"}), UnsupportedModelError, "weights.num_bits must be 8, got 4"),
    (compressed({"type": "real"}), UnsupportedModelError, "weights.type must be \"int\", got 'real'"),
    (compressed({"dynamic": True}), UnsupportedModelError, "weights.dynamic must be false, got True"),
    (
        compressed({"strategy": "tensor_group"}),
        UnsupportedModelError,
        "weights.strategy must be one of tensor, channel, group, got 'tensor_group'",
    ),
    (
        compressed({"group_size": None}),
        ConfigError,
        "weights.group_size must be an integer from 1 with strategy group, got None",
    ),
    (
        compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128"}),
        ConfigError,
        "weights.block_structure must be a list of two integers",
    ),
    (
        compressed({"num_bits": 8, "type": "float", "strategy": "block"}),
        ConfigError,
        "weights.block_structure must be a list of two integers with strategy block, but it is missing",
    ),
    (
        compressed(sparsity_config={"format": "marlin-24"}),
        UnsupportedModelError,
        "sparsity_config.format must be one of dense, sparse-bitmask, sparse-24-bitmask, got 'marlin-24'",
    ),
    (
        compressed(transform_config={"config_groups": {"R1": {}}}),
        UnsupportedModelError,
        "transform_config must be missing or empty (rotations are not supported)",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        ConfigError,
        "config_groups.a must be an object, got 1",
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
    assert str(caught.value).startswith(f"{folder / 'quantize_config.json'}: bits must be 2 or 3")


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
