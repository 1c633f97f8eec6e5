"""Selection of a GGUF file in directories and repositories with several."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule import ModelFileError, ModelNotFoundError
from ferrule._loading import find_model
from ferrule._loading.gguf_files import choose_model, models_in

FILES = [
    "README.md",
    "Model-7B-Q4_K_M.gguf",
    "Model-7B-UD-Q4_K_M.gguf",
    "model-7b-q8_0-00001-of-00002.gguf",
    "model-7b-q8_0-00002-of-00002.gguf",
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
    "Model-7B.IQ4_XS.gguf",
    "mmproj-Model-7B-F16.gguf",
    "f16/Model-7B-instruct-Q5_0.gguf",
    "f16/Model-7B-base-Q5_0.gguf",
]


@pytest.mark.parametrize(
    ("quantization", "parts"),
    [
        ("Q4_K_M", ["Model-7B-Q4_K_M.gguf"]),
        ("q4_k_m", ["Model-7B-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["Model-7B-UD-Q4_K_M.gguf"]),
        ("Q8_0", FILES[3:5]),
        ("BF16", FILES[5:7]),
        ("IQ4_XS", ["Model-7B.IQ4_XS.gguf"]),
        ("Model-7B.IQ4_XS.gguf", ["Model-7B.IQ4_XS.gguf"]),
        ("base-Q5_0", ["f16/Model-7B-base-Q5_0.gguf"]),
    ],
)
def test_quantization_matches_end_of_name(quantization: str, parts: list[str]) -> None:
    assert choose_model(FILES, quantization, "org/repo") == parts


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("Q6_K", r"org/repo:Q6_K: no such file; available: BF16/Model-7B-BF16.gguf, Model-7B-Q4_K_M.gguf, .*q8_0.gguf"),
        ("F16", "org/repo:F16: no such file"),
        (
            "Q5_0",
            r"org/repo:Q5_0: several files match \(f16/Model-7B-base-Q5_0.gguf, f16/Model-7B-instruct-Q5_0.gguf\)",
        ),
    ],
)
def test_missing_or_ambiguous_quantization_lists_files(quantization: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        choose_model(FILES, quantization, "org/repo")
    with pytest.raises(ModelNotFoundError, match="available: no GGUF files"):
        choose_model(["config.json"], quantization, "org/repo")


def test_split_files_are_one_model() -> None:
    assert models_in(FILES)["model-7b-q8_0"] == FILES[3:5]


def test_folder_with_one_split_model(tmp_path: Path) -> None:
    for name in ("m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "mmproj-m.gguf", "notes.txt"):
        (tmp_path / name).touch()
    assert find_model(tmp_path) == tmp_path / "m-00001-of-00002.gguf"


def test_folder_with_several_models_is_rejected(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        ModelFileError, match=r"several GGUF models; give the path of one of them: m-Q4_0.gguf, m-Q8_0.gguf"
    ):
        find_model(tmp_path)
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path) == tmp_path, "a checkpoint of its own goes before others' files beside it"


def test_file_paths(tmp_path: Path) -> None:
    file = tmp_path / "model.GGUF"
    with pytest.raises(ModelNotFoundError, match=r"model\.GGUF"):
        find_model(file)
    file.touch()
    assert find_model(file) == file
    assert find_model(tmp_path) == file
