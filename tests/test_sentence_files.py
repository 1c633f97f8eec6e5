"""Files of sentence-transformers: every module runs as specified, or is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule import LLM, ConfigError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from ferrule._loading.sentence_files import SentenceFiles, read_sentence_files
from ferrule.archs import model_spec
from ferrule.archs.config import Config
from ferrule.archs.spec import ModelSpec, TextProjection
from test_encoders import GOLDEN

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"}
SPEC = model_spec(Config.read(GOLDEN / "bert" / "config.json"))


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[SentenceFiles, ModelSpec]]:
    """Returns a function that reads a folder with given files."""

    def read(files: dict[str, object], spec: ModelSpec = SPEC) -> tuple[SentenceFiles, ModelSpec]:
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_sentence_files(tmp_path, spec)

    return read


Read = Callable[..., tuple[SentenceFiles, ModelSpec]]


def with_pooling(**pooling: object) -> dict[str, object]:
    return {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": pooling}


def with_dense(**dense: object) -> dict[str, object]:
    settings = {"in_features": 64, "out_features": 32, "bias": True} | dense
    modules = [TRANSFORMER, POOLING, DENSE, NORMALIZE]
    return with_pooling(pooling_mode="cls") | {"modules.json": modules, "2_Dense/config.json": settings}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True}, "last"),
    ],
)
def test_pooling_modes(pooling: dict[str, object], expected: str, read: Read) -> None:
    files, spec = read(with_pooling(**pooling))
    assert (files.pooling, files.normalize, files.embeds) == (expected, False, True)
    assert spec is SPEC


def test_defaults_without_files(read: Read) -> None:
    assert read({})[0] == SentenceFiles(pooling="mean", normalize=True)
    decoder = model_spec(Config.read(GOLDEN / "qwen3" / "config.json"))
    assert read({}, decoder)[0] == SentenceFiles(pooling="last", normalize=True)


def test_dense_modules_become_projections(read: Read) -> None:
    files, spec = read(with_dense(activation_function="torch.nn.modules.activation.Tanh"))
    assert files.normalize
    assert spec.text_projections == [TextProjection(32, "tanh", bias=True)]
    assert spec.embedding_size == 32
    assert spec.tensors["text_projections.0.weight"].names == ("2_Dense/linear.weight",)
    assert spec.tensors["text_projections.0.bias"].names == ("2_Dense/linear.bias",)
    assert spec.tensors["embedding.weight"] == SPEC.tensors["embedding.weight"]
    without = read(with_dense(activation_function="torch.nn.modules.linear.Identity", bias=False))[1]
    assert without.text_projections == [TextProjection(32, None, bias=False)]


def test_text_preprocessing_settings(read: Read) -> None:
    files, _ = read(
        {
            "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": True},
            "config_sentence_transformers.json": {
                "prompts": {"query": "q: ", "none": None},
                "default_prompt_name": None,
            },
        }
    )
    assert (files.max_tokens, files.lower_case, files.prompts, files.default_prompt) == (
        128,
        True,
        {"query": "q: "},
        None,
    )


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        (with_pooling(pooling_mode="max"), UnsupportedModelError, "pooling_mode must be one of cls, mean"),
        (with_pooling(pooling_mode=["cls", "mean"]), ConfigError, "pooling_mode must be a string, got ['cls', 'mean']"),
        (
            with_pooling(pooling_mode_cls_token=True),
            UnsupportedModelError,
            "pooling_mode_cls_token and pooling_mode_mean_tokens is true",
        ),
        (
            with_pooling(pooling_mode_max_tokens=True, pooling_mode_mean_tokens=False),
            UnsupportedModelError,
            "pooling_mode_max_tokens is true; ferrule runs one of",
        ),
        (with_pooling(pooling_mode_mean_tokens=False), UnsupportedModelError, "no pooling_mode is true"),
        (
            with_pooling(pooling_mode_mean_tokens="yes"),
            ConfigError,
            "pooling_mode_mean_tokens must be true or false, got 'yes'",
        ),
        ({"modules.json": [TRANSFORMER, POOLING]}, ModelNotFoundError, "1_Pooling/config.json: no such file"),
        ({"modules.json": {}}, ConfigError, "modules.json: content must be a list of objects"),
        ({"modules.json": [5]}, ConfigError, "with type and path, got 5"),
        ({"modules.json": "["}, ConfigError, "not valid JSON"),
        ({"modules.json": [{"type": 5}]}, ConfigError, "type must be a string, got 5"),
        (
            {"modules.json": [{"type": "sentence_transformers.models.CNN", "path": ""}]},
            UnsupportedModelError,
            "type must be one of Transformer, Pooling",
        ),
        (
            {"modules.json": [TRANSFORMER | {"path": "0_Transformer"}]},
            UnsupportedModelError,
            "path must be empty (the model's files are beside modules.json)",
        ),
        (
            with_pooling() | {"modules.json": [POOLING, POOLING]},
            UnsupportedModelError,
            "at most one module of type Pooling",
        ),
        (
            with_dense() | {"modules.json": [POOLING, NORMALIZE, DENSE]},
            UnsupportedModelError,
            "Normalize must be the last module, got Dense after it",
        ),
        (
            with_dense(in_features=63),
            ConfigError,
            "in_features must be 64, the output width of the previous module, got 63",
        ),
        (with_dense(out_features=0), ConfigError, "out_features must be an integer from 1 to 268435456, got 0"),
        (
            with_dense(activation_function="torch.nn.Softmax"),
            UnsupportedModelError,
            "activation_function must be one of Identity, Tanh, ReLU, GELU, SiLU",
        ),
        (
            with_dense(module_input_name="token_embeddings"),
            UnsupportedModelError,
            'module_input_name must be "sentence_embedding"',
        ),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
            ConfigError,
            "default_prompt_name must be a name of prompts (empty), got 'query'",
        ),
        (
            {"config_sentence_transformers.json": {"prompts": {"query": 5}}},
            ConfigError,
            "prompts.query must be a string, got 5",
        ),
        (
            {"sentence_bert_config.json": {"max_seq_length": 0}},
            ConfigError,
            "max_seq_length must be an integer from 1 to 268435456, got 0",
        ),
        (
            {"modules.json": [{"type": "x.LogitScore", "path": "1"}], "1/config.json": {"true_token_id": 5}},
            UnsupportedModelError,
            "whose logit is subtracted from the logit of true_token_id, but it is missing",
        ),
        (
            {"modules.json": [{"type": "x.LogitScore", "path": "1"}], "1/config.json": {"true_token_id": 320}},
            ConfigError,
            "true_token_id must be an integer from 0 to 319, got 320",
        ),
    ],
)
def test_unsupported_files(files: dict[str, object], error: type[Exception], words: str, read: Read) -> None:
    with pytest.raises(error) as caught:
        read(files)
    assert words in str(caught.value)


@pytest.mark.parametrize("path", ["..", "../x", "/etc", "a/b", "a\\b", "a\0b", "./1_Pooling"])
def test_folder_outside_the_model_is_rejected(path: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=r"the name of a directory beside modules\.json"):
        read({"modules.json": [TRANSFORMER, POOLING | {"path": path}]})


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """The golden model with two projections, to be changed."""
    shutil.copytree(GOLDEN / "gemma3", tmp_path / "gemma", copy_function=shutil.copyfile)
    return tmp_path / "gemma"


@pytest.mark.native
def test_projections_change_embeddings(gemma: Path) -> None:
    text: Any = {"prompt_token_ids": [5, 6, 7]}
    with LLM(gemma, quantization="f32") as llm:
        whole = llm.embed(text, normalize=False)[0].outputs.embedding
        cut = llm.embed(text, dimensions=8)[0].outputs.embedding
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    modules = json.loads((gemma / "modules.json").read_text())
    (gemma / "modules.json").write_text(json.dumps([module for module in modules if "Dense" not in module["type"]]))
    with LLM(gemma, quantization="f32") as llm:
        assert llm.embed(text)[0].outputs.embedding.shape == (64,)


@pytest.mark.native
def test_missing_or_mismatched_projection_weights(gemma: Path) -> None:
    weights = gemma / "2_Dense" / "model.safetensors"
    shutil.copyfile(gemma / "3_Dense" / "model.safetensors", weights)
    message = r'tensor "2_Dense/linear.weight" must have shape \[96, 64\] .* for this config, got \[48, 96\]'
    with pytest.raises(ConfigError, match=message):
        LLM(gemma)
    weights.rename(gemma / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"2_Dense: has only pickle files \(pytorch_model.bin\)"):
        LLM(gemma)
