"""DeepSeek-V4: how config.json is read, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from archs.specs import LEFT_OUT, assert_refused, experts, folder_of, spec_of
from ferrule import LLM, ModelFileError, UnsupportedModelError
from ferrule.archs.spec import (
    Clamp,
    CompressedAttention,
    Compression,
    EntryIndexer,
    ModelSpec,
    NoScaling,
    RmsNorm,
    Sinkhorn,
    Weighted,
    YarnScaling,
)
from ferrule.archs.tensors import roles
from quantized_files import MXFP4, Floats, Stored, read, write

Codes: TypeAlias = npt.NDArray[np.uint8]

CASE = "deepseek_v4"


def attentions(spec: ModelSpec) -> list[CompressedAttention]:
    """Attention of each layer."""
    return [attention for layer in spec.layers for attention in layer.mixers(CompressedAttention)]


def blocks(spec: ModelSpec) -> list[int | None]:
    """Tokens of a block of each layer; None for layers without entries."""
    found = [attention.compression for attention in attentions(spec)]
    return [None if compression is None else compression.block for compression in found]


def by_token(spec: ModelSpec) -> list[bool]:
    """Layers whose experts are chosen by token id."""
    return [found is not None and found.router.token_experts for found in experts(spec)]


def test_layers_attend_to_a_window_and_to_entries() -> None:
    spec = spec_of(CASE)
    indexer = EntryIndexer(heads=8, head_dim=16, entries=8)
    wanted = [None, Compression(16), Compression(4, overlap=True, indexer=indexer)]
    assert [attention.compression for attention in attentions(spec)] == wanted
    assert [attention.window for attention in attentions(spec)] == [32] * 3
    assert [spec.ropes[attention.rope].theta for attention in attentions(spec)] == [10_000, 160_000, 160_000]
    assert set(roles(spec)) == set(spec.tensors)


def test_streams_are_mixed_by_matrices() -> None:
    spec = spec_of(CASE)
    norm = RmsNorm(1e-6, weight=False)
    assert spec.streams is not None
    assert (spec.streams.count, spec.streams.ends) == (4, Weighted(norm, 1e-6))
    assert all(span.mix == Sinkhorn(norm, 1e-6, 20) for layer in spec.layers for span in layer.spans)
    assert all(block.stream_scale == 0 for layer in spec.layers for block in layer.blocks)


def test_experts_by_token_have_no_correction_bias() -> None:
    spec = spec_of(CASE)
    assert by_token(spec) == [True, False, False]
    for found in experts(spec):
        assert found is not None
        assert found.router.correction_bias != found.router.token_experts
        assert found.expert == found.shared
        assert found.expert.clamp == Clamp(alpha=1, limit=10, offset=0)
    assert by_token(spec_of(CASE, mlp_layer_types=LEFT_OUT)) == [True] * 3
    assert by_token(spec_of(CASE, mlp_layer_types=LEFT_OUT, num_hash_layers=2)) == [True, True, False]


def test_older_fields() -> None:
    expected = spec_of(CASE, compress_rates=LEFT_OUT)
    assert blocks(expected) == [None, 128, 4]
    ratios = spec_of(CASE, layer_types=LEFT_OUT, compress_rates=LEFT_OUT, compress_ratios=[0, 128, 4, 0])
    assert ratios.layers == expected.layers
    assert blocks(spec_of(CASE, compress_rate_csa=8, compress_rate_hca=32)) == [None, 32, 8]
    usual = spec_of(CASE, layer_types=LEFT_OUT, num_hidden_layers=5, mlp_layer_types=LEFT_OUT)
    assert blocks(usual) == [16, 16, 16, 4, 16]


def test_only_layers_with_entries_have_scaled_rotary_embeddings() -> None:
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
    spec = spec_of(CASE, rope_parameters=LEFT_OUT, rope_scaling=yarn, partial_rotary_factor=LEFT_OUT)
    main, compressed = spec.ropes
    assert (main.theta, main.rotary_dim, main.scaling) == (10_000, 8, NoScaling())
    assert (compressed.theta, compressed.rotary_dim) == (160_000, 8)
    assert isinstance(compressed.scaling, YarnScaling)
    assert (compressed.scaling.factor, compressed.scaling.attention_factor) == (16, 1)
    assert spec.max_position_embeddings == 512


def test_names_of_the_makers_files() -> None:
    spec = spec_of(CASE)
    alternative = spec.tensors["embedding.weight"].alternative
    assert alternative is not None
    assert alternative.names == ("embed.weight",)
    alternative = spec.tensors["streams.end.mix.weight"].alternative
    assert alternative is not None
    assert alternative.names == ("hc_head_fn",)
    assert ("model.", "") in spec.prefixes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types must be a list of 3 items, each one of sliding"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must be a list of 3 items"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types must be a list of 3 items, each one of hash_moe, moe"),
        (
            {"layer_types": LEFT_OUT, "compress_ratios": [0, 4, 5]},
            "compress_ratios must be a list of at least 3 items, each one of 0, 4, 128",
        ),
        (
            {"compress_rates": {"compressed_sparse_attention": 3}},
            "compress_rates.compressed_sparse_attention must be a divisor or a multiple of 16, got 3",
        ),
        ({"compress_rate_hca": 24}, "compress_rate_hca must be a divisor or a multiple of 16, got 24"),
        ({"o_groups": 3}, "o_groups must be a divisor of num_attention_heads (4), got 3"),
        ({"index_head_dim": 4}, "index_head_dim must be an integer from 8"),
        ({"index_topk": 0}, "index_topk must be an integer from 1"),
        ({"hc_mult": 1}, "hc_mult must be an integer from 2 to 16, got 1"),
        ({"hc_sinkhorn_iters": 101}, "hc_sinkhorn_iters must be an integer from 1 to 100, got 101"),
        ({"hc_eps": 0}, "hc_eps must be a finite number above 0, got 0"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a finite number above 0, got 0"),
        ({"num_hash_layers": -1, "mlp_layer_types": LEFT_OUT}, "num_hash_layers must be an integer from 0"),
        ({"rope_parameters": {"compress": {}, "main": {"rope_type": "no"}}}, "rope_parameters.main.rope_type must be"),
    ],
)
def test_unsupported_values(changes: dict[str, Any], message: str) -> None:
    assert_refused(CASE, changes, message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 2),
        ("attention_bias", True),
        ("scoring_func", "sigmoid"),
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
    ],
)
def test_switches_with_one_supported_value(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field} must be"):
        spec_of(CASE, **{field: value})


@pytest.mark.native
@pytest.mark.parametrize("found", [5, -1])
def test_ids_of_experts_are_checked(found: int, tmp_path: Path) -> None:
    shutil.copytree(folder_of(CASE), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    (header,) = struct.unpack_from("<Q", data)
    name = "model.layers.0.ffn.gate.tid2eid"
    first, _ = json.loads(data[8 : 8 + header])[name]["data_offsets"]
    struct.pack_into("<q", data, 8 + header + first + 8, found)
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(ModelFileError, match=f"{name}.* must hold integers from 0 to 4, got {found}"):
        LLM(tmp_path / "model", quantization="f32")


def codes_of(values: Floats, levels: Floats) -> tuple[Codes, int, Floats]:
    """Returns the nearest levels of a block, the exponent of their scale with its bias, and what they stand for."""
    exponent = int(np.ceil(np.log2(np.abs(values).max() / levels.max())))
    codes = np.abs(values[..., None] / 2.0**exponent - levels).argmin(-1).astype(np.uint8)
    return codes, exponent + 127, (levels[codes] * 2.0**exponent).astype(np.float32)


def eight_bits() -> Floats:
    """Returns the numbers of E4M3, with 0 for the two NaN."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    numbers = np.where(exponent == 0, mantissa / 8, 1 + mantissa / 8) * 2.0 ** (np.maximum(exponent, 1) - 7)
    return np.where(bits & 127 == 127, 0, np.where(bits < 128, numbers, -numbers)).astype(np.float32)


@pytest.mark.native
def test_makers_files_in_fp8_and_fp4_equal_their_numbers(tmp_path: Path) -> None:
    """Projections are FP8 with scales by block, and experts MXFP4, both with scales that are powers of two."""
    stored: dict[str, Stored] = {}
    plain: dict[str, Stored] = {}
    for name, (dtype, shape, raw) in read(folder_of(CASE)).items():
        own = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        own = own.replace("attn.norm.", "attn.kv_norm.")
        scale = own.replace(".weight", ".scale")
        if not re.search(r"\.(attn|shared_experts|experts\.\d+)\.w", own):
            stored[own] = plain[own] = dtype, shape, raw
            continue
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        if ".experts." in own and shape[1] % 32 == 0:
            blocks = [codes_of(block, MXFP4) for block in values.reshape(-1, 32)]
            pairs = np.concatenate([codes for codes, _, _ in blocks]).reshape(-1, 2)
            stored[own] = "I8", (shape[0], shape[1] // 2), (pairs[:, 0] | pairs[:, 1] << 4).tobytes()
            stored[scale] = "F8_E8M0", (shape[0], shape[1] // 32), bytes(exponent for _, exponent, _ in blocks)
            numbers = np.concatenate([numbers for _, _, numbers in blocks])
        else:
            codes, exponent, numbers = codes_of(values, eight_bits())
            stored[own] = "F8_E4M3", shape, codes.tobytes()
            stored[scale] = "F8_E8M0", (1, 1), bytes([exponent])
        plain[own] = "F32", shape, numbers.tobytes()
    config = json.loads((folder_of(CASE) / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    logits: list[Floats] = []
    for kind, tensors in (("stored", stored), ("plain", plain)):
        (tmp_path / kind).mkdir()
        described = {**config, "quantization_config": quantization} if kind == "stored" else config
        (tmp_path / kind / "config.json").write_text(json.dumps(described))
        write(tmp_path / kind, tensors)
        with LLM(tmp_path / kind, quantization="f32", kv_cache_dtype="f32") as llm:
            logits.append(llm.logits(list(range(3, 60))))
    np.testing.assert_array_equal(logits[0], logits[1])
