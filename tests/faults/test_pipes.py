"""Pipes in place of a model's files, which would block on open until a writer appears."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from conftest import TINY
from faults.isolated import assert_refused, run

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/rag.jinja",
    "model.safetensors",
    "modules.json",
)
WARM_UP = f"""
    from ferrule import LLM
    LLM({str(TINY)!r}, max_model_len=64, threads=1).close()
"""
LOAD = "LLM(arguments[0], max_model_len=64, threads=1)"


@pytest.mark.parametrize("name", FILES)
def test_pipe_in_model_directory(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / name).unlink(missing_ok=True)
    (model / name).parent.mkdir(exist_ok=True)
    os.mkfifo(model / name)
    outcome = run(LOAD, str(model), warm_up=WARM_UP, timeout=30)
    assert_refused(outcome, "ModelFileError", [name, "not a regular file"])


def test_pipe_instead_of_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    outcome = run(LOAD, str(tmp_path / "model.gguf"), warm_up=WARM_UP, timeout=30)
    assert_refused(outcome, "ModelFileError", ["model.gguf", "not a regular file"])
