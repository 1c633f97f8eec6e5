"""Packed models: bitwise the same results as the checkpoint, and their limits."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from crc32c import crc32c
from ferrule import (
    LLM,
    InsufficientMemoryError,
    InvalidParameterError,
    ModelFileError,
    _native,
    model_info,
    quantize,
)
from ferrule._api.quantization import FORMATS
from ferrule._cli.served_models import load_models
from ferrule._loading import WEIGHTS
from ferrule.server import OnDemand, ServerSettings
from packed_models import GOLDEN, bits, header_of, load

pytestmark = pytest.mark.native

CASES = sorted([*(GOLDEN / "logits").iterdir(), *(GOLDEN / "encoders").iterdir()])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_packed_model_equals_checkpoint_bit_for_bit(case: Path, tmp_path: Path) -> None:
    number = CASES.index(case)
    quantization = FORMATS[number % len(FORMATS)]
    packed = quantize(case, tmp_path / "packed", format=quantization, threads=1)
    expected = bits(case, quantization=quantization)
    assert bits(packed) == expected
    assert bits(packed, mmap=False) == expected
    assert bits(packed, quantization=quantization) == expected


def test_every_format_is_packed(tmp_path: Path) -> None:
    for quantization in FORMATS:
        packed = quantize(None, tmp_path / quantization, format=quantization)
        info, before = load(packed), model_info(packed)
        assert (info["quantization"], info["packed_file"]) == (quantization, str(packed / WEIGHTS))
        assert info["mapped_bytes"] == info["weight_bytes"] == model_info(quantization=quantization)["weight_bytes"]
        assert before["fits"]
        assert {name: before[name] for name in before.keys() & info.keys() - {"threads"}} == {
            name: info[name] for name in before.keys() & info.keys() - {"threads"}
        }
        assert load(packed, mmap=False)["mapped_bytes"] == 0
        config = json.loads((packed / "config.json").read_text())
        assert config.pop("quantization_config") == {"quant_method": "ferrule", "format": quantization}
        assert config == json.loads((TINY / "config.json").read_text())
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (packed / name).read_bytes() == (TINY / name).read_bytes()
    with LLM(tmp_path / "int8") as llm, LLM(quantization="int8") as plain:
        assert llm.generate("The capital of France is")[0].prompt == "The capital of France is"
        assert llm.chat_prompt([{"role": "user", "content": "Hi"}]) == plain.chat_prompt(
            [{"role": "user", "content": "Hi"}]
        )


def test_packed_file_is_aligned_safetensors(tmp_path: Path) -> None:
    path = quantize(GOLDEN / "logits" / "qwen2", tmp_path / "packed", format="int8") / WEIGHTS
    header, data = header_of(path)
    metadata = header.pop("__metadata__")
    assert len(metadata.pop("source")) == 16
    assert metadata == {
        "layout": "ferrule-2",
        "version": str(_native.layout_version),
        "quantization": "int8",
        "model": str(GOLDEN / "logits" / "qwen2"),
    }
    assert (path.stat().st_size - len(data)) % 4096 == 0
    spans = sorted(tuple(tensor["data_offsets"]) for tensor in header.values())
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == len(data)
    assert all(end % 64 == 0 for _, end in spans)
    assert {"embedding.0.int8", "embedding.0.int8.steps", "layers.0.attention.q+k+v.0.int8"} < header.keys()
    assert {"final_norm.weight", "layers.0.attention.q.bias"} < header.keys()


def test_packed_model_rejects_other_quantization(tmp_path: Path) -> None:
    packed = quantize(GOLDEN / "logits" / "llama", tmp_path / "packed", format="int8")
    with pytest.raises(InvalidParameterError, match="quantization must be auto or int8, the format in which"):
        LLM(packed, quantization="int4")
    with pytest.raises(
        InvalidParameterError, match=r"quantization must be auto or int8, the format in which .* is packed"
    ):
        model_info(packed, quantization="f32")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["format"] = "int4"
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match='is packed as "int8", but "int4" was requested'):
        LLM(packed)
    config["quantization_config"]["format"] = "int5"
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidParameterError, match="quantization must be one of auto, f32, bf16, f16, int8, int4, got 'int5'"
    ):
        LLM(packed)


class Sparse:
    """A packed bf16 model in a sparse file with a declared size, of which only a few pages are on the disk."""

    HIDDEN = 8192

    def __init__(self, directory: Path, claimed: int) -> None:
        directory.mkdir()
        hidden = self.HIDDEN
        vocab = claimed // (2 * hidden) // 16 * 16
        config = json.loads((GOLDEN / "logits" / "llama" / "config.json").read_text())
        config |= {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": 1, "tie_word_embeddings": True}
        config |= {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 64, "intermediate_size": 64}
        config["quantization_config"] = {"quant_method": "ferrule", "format": "bf16"}
        (directory / "config.json").write_text(json.dumps(config))
        vectors = ["final_norm", "layers.0.attention_norm", "layers.0.ffn_norm"]
        sizes = {f"{name}.weight": ("F32", 4 * hidden) for name in vectors}
        matrices = {
            "embedding": vocab * hidden,
            "layers.0.attention.q+k+v": 3 * hidden * hidden,
            "layers.0.attention.output": hidden * hidden,
            "layers.0.ffn.gate+up": 128 * hidden,
            "layers.0.ffn.down": hidden * 64,
        }
        sizes |= {f"{name}.0.bf16": ("U8", 2 * numbers) for name, numbers in matrices.items()}
        metadata = {"layout": "ferrule-2", "version": str(_native.layout_version), "quantization": "bf16"}
        header: dict[str, Any] = {"__metadata__": metadata}
        self.bytes = 0
        for name, (dtype, size) in sizes.items():
            shape = [size // (4 if dtype == "F32" else 1)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self.bytes, self.bytes + size]}
            self.bytes += size
        # The checksum of the header is right; the checksums of the tensors are not.
        checksums = 4 * (len(sizes) + 1)
        checksums += -checksums % 64
        end = self.bytes + checksums
        header["checksums"] = {"dtype": "U8", "shape": [checksums], "data_offsets": [self.bytes, end]}
        text = json.dumps(header).encode()
        text = struct.pack("<Q", -(len(text) + 8) % 4096 + len(text)) + text.ljust(-(len(text) + 8) % 4096 + len(text))
        with (directory / WEIGHTS).open("wb") as file:
            file.write(text)
            file.truncate(len(text) + end)
            file.seek(len(text) + self.bytes)
            file.write(struct.pack("<I", crc32c(text)))


def test_packed_weights_larger_than_memory_require_allow_paging(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    directory = tmp_path / "model"
    sparse = Sparse(directory, 4 * memory)
    weights = model_info(directory)["weight_bytes"]
    assert weights == sparse.bytes - 3 * 4 * Sparse.HIDDEN
    for options in ({}, {"mmap": False}):
        with pytest.raises(
            InsufficientMemoryError,
            match=rf"needs {weights} bytes for its packed weights, but only \d+ bytes are available.*allow_paging",
        ):
            LLM(directory, **options)  # pyright: ignore[reportArgumentType]
    assert not model_info(directory)["fits"]
    assert model_info(directory, allow_paging=True)["fits"]
    # Random numbers are not mapped.
    dummy = model_info(directory, allow_paging=True, load_format="dummy")
    assert not dummy["fits"]
    assert "allow_paging" not in dummy["verdict"]
    name = str(directory)
    served = load_models({"m": name}, {}, ServerSettings(), on_demand={name})["m"]
    assert isinstance(served, OnDemand)
    assert served.missing_memory() >= weights - memory
    with LLM(directory, allow_paging=True, threads=1) as llm:
        assert llm.info()["mapped_bytes"] == weights
        assert llm.info()["kv_cache_bytes"] > 0
