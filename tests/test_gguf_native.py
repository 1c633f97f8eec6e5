"""GGUF files of the tensor types that kernels multiply directly: size in memory and logits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType

import gguf_convert
from conftest import TINY
from ferrule import LLM, model_info

pytestmark = pytest.mark.native

NATIVE = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]

# Types that the `gguf` package quantizes to.
QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def zero_blocks(values: gguf_convert.Array, kind: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((*values.shape[:-1], values.shape[-1] // inputs * size), np.uint8)


@pytest.mark.parametrize("storage", NATIVE)
def test_weights_take_at_most_5_percent_more_memory_than_in_the_file(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "quantize", zero_blocks)
    file = gguf_convert.convert(TINY, tmp_path / "tiny.gguf", storage)
    before = model_info(file)
    with LLM(file, threads=1) as llm:
        info = llm.info()
    assert list(info["weight_bytes_by_format"]) == [storage.lower()]
    assert info["weight_bytes"] <= 1.05 * before["stored_types"][storage]["bytes"]
    for field in ("weight_bytes", "weight_bytes_by_format"):
        assert before[field] == info[field]


@pytest.mark.parametrize("storage", QUANTIZED)
def test_logits_are_close_to_those_of_dequantized_weights(storage: str, tmp_path: Path) -> None:
    file = gguf_convert.convert(TINY, tmp_path / "tiny.gguf", storage)
    ids = list(range(7, 107))
    with LLM(file, quantization="f32", threads=1) as llm:
        expected = llm.logits(ids)
    with LLM(file, threads=1) as llm:
        logits = llm.logits(ids)
    assert float(np.abs(logits - expected).max() / np.abs(expected).max()) <= 0.03
