"""The embedded model as a GGUF file has the same text, tokens and template as its own files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import TINY
from ferrule import LLM, SamplingParams, model_info
from gguf_convert import convert

pytestmark = pytest.mark.native

TEXTS = ["Once upon a time,", "The capital of France is", "The sun is", "A dog is an animal that"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of Italy?"},
]


@pytest.fixture(scope="module")
def embedded() -> LLM:
    return LLM(quantization="f32", kv_cache_dtype="f32")


@pytest.fixture(scope="module")
def tiny_f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(TINY, tmp_path_factory.mktemp("tiny") / "tiny-F16.gguf", "F16")


def test_f16_logits_are_close_to_bf16(embedded: LLM, tiny_f16: Path) -> None:
    """The embedded weights are bf16; f16 represents all but the smallest exactly."""
    ids = embedded.tokenize(" ".join(TEXTS))
    expected = embedded.logits(ids)
    with LLM(tiny_f16, quantization="f32", kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)
    assert float(np.abs(logits - expected).max() / np.abs(expected).max()) <= 1e-4


@pytest.mark.parametrize("storage", ["F32", "F16", "BF16", "Q8_0"])
def test_greedy_outputs_equal_safetensors(storage: str, embedded: LLM, tmp_path: Path) -> None:
    file = convert(TINY, tmp_path / "tiny.gguf", storage)
    expected = [out.outputs[0].token_ids for out in embedded.generate(TEXTS, PARAMS)]
    with LLM(file, quantization="f32", kv_cache_dtype="f32") as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(TEXTS, PARAMS)] == expected


@pytest.mark.parametrize("storage", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_four_and_five_bit_types_generate(storage: str, tmp_path: Path) -> None:
    file = convert(TINY, tmp_path / "tiny.gguf", storage)
    with LLM(file, quantization="f32") as llm:
        assert "Paris" in llm.generate("The capital of France is", PARAMS)[0].outputs[0].text


def test_chat_template_and_eos_tokens(embedded: LLM, tiny_f16: Path) -> None:
    with LLM(tiny_f16, quantization="f32") as llm:
        assert llm.chat_prompt(CONVERSATION) == embedded.chat_prompt(CONVERSATION)
        assert set(embedded.info()["eos_token_ids"]) <= set(llm.info()["eos_token_ids"])
        answer = llm.chat(CONVERSATION, SamplingParams(temperature=0, max_tokens=64))[0].outputs[0]
        assert (
            answer.text == embedded.chat(CONVERSATION, SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text
        )
        assert answer.finish_reason == "stop"


def test_info_reports_stored_types(tiny_f16: Path) -> None:
    info, of_files = model_info(tiny_f16), model_info()
    assert info["file"] == str(tiny_f16)
    assert info["directory"] == str(tiny_f16.parent)
    assert of_files["file"] is None
    assert {type_: stored["tensors"] for type_, stored in info["stored_types"].items()} == {"F16": 43, "F32": 13}
    assert sum(stored["bytes"] for stored in info["stored_types"].values()) == info["checkpoint_bytes"]
    assert list(of_files["stored_types"]) == ["BF16"]
    same = ("layers", "hidden_size", "vocab_size", "context", "parameters", "chat_template", "architecture")
    assert [info[field] for field in same] == [of_files[field] for field in same]
    assert json.loads(json.dumps(info)) == info


def test_folder_with_one_gguf_file(tiny_f16: Path) -> None:
    assert model_info(tiny_f16.parent)["file"] == str(tiny_f16)
