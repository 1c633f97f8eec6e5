"""GGUF files as input of `quantize`: the directory has bitwise the same results, tokens and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter

from conftest import TINY
from ferrule import LLM, ConfigError, InvalidParameterError, ModelFileError, SamplingParams, model_info, quantize
from ferrule._api.quantization import FORMATS
from ferrule._cli import main
from ferrule._loading import read_model_files
from gguf_convert import convert
from test_encoders import GOLDEN as ENCODERS
from test_gguf_archs import CASES, GOLDEN, MIXERS, VARIANTS, VARIED

pytestmark = pytest.mark.native

FAMILIES = [
    *((GOLDEN / "logits" / case) for case in CASES),
    *((GOLDEN / "variants" / case) for case in (*VARIANTS, *MIXERS, *VARIED)),
]
PROMPT = list(range(7, 40))
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of Italy?"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(TINY, tmp_path_factory.mktemp("tiny") / "tiny-F16.gguf", "F16")


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_packed_directory_equals_the_file_bit_for_bit(case: Path, tmp_path: Path) -> None:
    quantization = FORMATS[FAMILIES.index(case) % len(FORMATS)]
    file = convert(case, tmp_path / "model.gguf")
    packed = quantize(file, tmp_path / "packed", format=quantization, threads=1)
    with LLM(file, quantization=quantization, threads=1) as llm:
        expected = llm.logits(PROMPT)
    with LLM(packed, threads=1) as llm:
        assert np.array_equal(llm.logits(PROMPT), expected)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embedding_models_keep_their_pooling(pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS, "last": gguf.PoolingType.LAST}
    original = GGUFWriter.write_header_to_file

    def with_pooling(writer: GGUFWriter, *args: Any, **kwargs: Any) -> None:
        writer.kv_data[0].pop("bert.pooling_type", None)
        writer.add_pooling_type(kinds[pooling])
        original(writer, *args, **kwargs)

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", with_pooling)
    file = convert(ENCODERS / "bert", tmp_path / "model.gguf")
    packed = quantize(file, tmp_path / "packed", format="f16")
    assert read_model_files(packed).sentence == read_model_files(file).sentence
    assert read_model_files(packed).sentence.pooling == pooling
    with LLM(file, quantization="f16", threads=1) as llm, LLM(packed, threads=1) as other:
        prompt: Any = {"prompt_token_ids": PROMPT}
        assert np.array_equal(llm.embed(prompt)[0].outputs.embedding, other.embed(prompt)[0].outputs.embedding)


def test_tokens_chat_and_output_are_the_same(tiny: Path, tmp_path: Path) -> None:
    packed = quantize(tiny, tmp_path / "int8", format="int8")
    params = SamplingParams(temperature=0, max_tokens=32)
    texts = ["The capital of France is", " two  spaces\n", "<|user|>not a turn<|end|>", "naïve 🙂"]
    with LLM(tiny, quantization="int8") as llm, LLM(packed) as other:
        assert [other.tokenize(text) for text in texts] == [llm.tokenize(text) for text in texts]
        assert other.chat_prompt(CONVERSATION) == llm.chat_prompt(CONVERSATION)
        for ask in (lambda each: each.chat(CONVERSATION, params), lambda each: each.generate(texts, params)):
            assert [out.outputs[0].text for out in ask(other)] == [out.outputs[0].text for out in ask(llm)]
        info, expected = other.info(), llm.info()
        assert info["eos_token_ids"] == expected["eos_token_ids"]
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int8"
    assert config["quantization_config"]["gguf"]["interleaved"] is True
    before = model_info(packed)
    assert (before["quantization"], before["chat_template"], before["architecture"]) == ("int8", True, "llama")


def with_keys(path: Path, **texts: Any) -> Path:
    """Writes the embedded model with further keys in its metadata."""
    original = GGUFWriter.write_header_to_file

    def written(writer: GGUFWriter, *args: Any, **kwargs: Any) -> None:
        for key, value in texts.items():
            name = key.replace("__", ".")
            if isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_float32(name, value)
        original(writer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "write_header_to_file", written)
        return convert(TINY, path)


def test_recommended_sampling_and_named_templates_are_kept(tmp_path: Path) -> None:
    keys = {"general__sampling__temp": 0.25, "tokenizer__chat_template__tool_use": "tools: {{ messages|length }}é"}
    file = with_keys(tmp_path / "tiny.gguf", **keys)
    packed = quantize(file, tmp_path / "packed", format="int8")
    assert read_model_files(packed).defaults == read_model_files(file).defaults
    assert read_model_files(packed).defaults.temperature == 0.25
    with LLM(packed) as llm:
        assert llm.chat_prompt(CONVERSATION, chat_template="tool_use").get("prompt") == "tools: 2é"


def test_template_names_that_are_paths_are_refused(tmp_path: Path) -> None:
    file = with_keys(tmp_path / "tiny.gguf", **{"tokenizer__chat_template__../../name": "{{ 1 }}"})
    with pytest.raises(ModelFileError, match=r"name of a chat template must be a file name, got '\.\./\.\./name'"):
        quantize(file, tmp_path / "out" / "packed")
    assert not list((tmp_path / "out").iterdir())


def test_directory_of_the_file_is_not_replaced(tiny: Path) -> None:
    with pytest.raises(InvalidParameterError, match="a directory other than the model's own and its parents"):
        quantize(tiny, tiny.parent, overwrite=True)
    assert tiny.exists()


def test_calibration_and_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. The sun is a star. " * 200)
    out = tmp_path / "packed"
    arguments = ["quantize", str(tiny), "-o", str(out), "--calibrate", str(text), "--calibration-tokens", "256"]
    assert main(arguments) == 0
    assert "int4" in capsys.readouterr().err
    assert main(["run", str(out), "What is the capital of France?", "--temperature", "0"]) == 0
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([], r"quantization_config\.gguf must be an object"),
        ({"interleaved": 1}, r"quantization_config\.gguf\.interleaved must be true or false, got 1"),
        ({"alternating": "no"}, r"quantization_config\.gguf\.alternating must be true or false"),
    ],
)
def test_damaged_form_is_an_error(form: Any, message: str, tiny: Path, tmp_path: Path) -> None:
    packed = quantize(tiny, tmp_path / "packed", format="int8")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["gguf"] = form
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        LLM(packed)
