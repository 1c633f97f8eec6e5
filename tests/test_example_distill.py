"""examples/distill: collected data are the teacher's, invalid arguments are refused, a trained student is closer.

Training needs PyTorch and transformers (gigabytes on PyPI, with CUDA), which no extra and no part of CI installs.
"""

# PyTorch is not installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ferrule import LLM

EXAMPLE = Path(__file__).parents[1] / "examples" / "distill"
TINY = EXAMPLE.parents[1] / "python" / "ferrule" / "models" / "tiny"
TEXT = "The capital of France is Paris. Once upon a time, there was a cat. " * 4

pytestmark = pytest.mark.native
needs_torch = pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="PyTorch is not installed: pip install torch transformers",
)


def run(program: str, *arguments: str | Path) -> str:
    """Returns the output of a program."""
    command = [sys.executable, str(EXAMPLE / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sampled_data_equal_teacher(tmp_path: Path) -> None:
    out = tmp_path / "data"
    said = run("collect.py", "--out", out, "--texts", "3", "--length", "24", "-k", "5")
    assert said.startswith(f"{out}: 3 texts of 24 tokens, 5 logprobs each, ")
    data = load_file(out / "shard-00000.safetensors")
    assert data["offsets"].tolist() == [0, 24, 48, 72]
    texts = data["token_ids"].reshape(3, 24)
    assert len({tuple(text) for text in texts.tolist()}) == 3
    with LLM(quantization="f32") as teacher:
        assert texts[:, 0].tolist() == [teacher.get_tokenizer().bos_token_id] * 3
        found = list(teacher.top_logprobs([{"prompt_token_ids": text} for text in texts.tolist()], 5))
    np.testing.assert_array_equal(data["top_ids"], np.concatenate([each.top_ids for each in found]))
    np.testing.assert_array_equal(data["top_logprobs"], np.concatenate([each.top_logprobs for each in found]))
    assert json.loads((out / "index.json").read_text())["complete"] is True


def test_given_text_is_cut_into_windows(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    run("collect.py", "--out", tmp_path / "data", "--text", tmp_path / "text", "--length", "16", "-k", "1")
    (bos, *token_ids) = load_file(tmp_path / "data" / "shard-00000.safetensors")["token_ids"].reshape(-1, 16).T
    with LLM() as teacher:
        tokenizer = teacher.get_tokenizer()
    expected = tokenizer.encode(TEXT, add_special_tokens=False)
    windows = len(expected) // 15
    assert windows > 2
    assert bos.tolist() == [tokenizer.bos_token_id] * windows
    assert np.transpose(token_ids).ravel().tolist() == expected[: windows * 15]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes texts that are too short, empty and not UTF-8, and a model without a tokenizer."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "short").write_text("the")
    (folder / "empty").touch()
    (folder / "binary").write_bytes(b"\xff\xfe")
    (folder / "mute").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, folder / "mute")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--texts 0", r"--texts must be >= 1, got 0"),
        ("--length 1", r"--length must be from 2 to 2048 \(the context\), got 1"),
        ("--length 4096", r"--length must be from 2 to 2048 \(the context\), got 4096"),
        ("-k 4097", r"-k must be from 1 to 4096 \(the vocabulary\), got 4097"),
        ("-k 0", r"-k must be from 1 to 4096 \(the vocabulary\), got 0"),
        ("--quantization int5", r".*int5.*"),
        ("--text {0}/short", r"--text must have at least 127 tokens \(--length\), got 1"),
        ("--text {0}/empty", r"--text must have at least 127 tokens \(--length\), got 0"),
        ("--text {0}/binary", r".*utf-8.*"),
        ("--text {0}/none", r".*No such file.*none.*"),
        ("{0}/none", r".*none.*"),
        ("{0}/mute", r"TEACHER must have a tokenizer, {0}/mute has no tokenizer.json"),
        ("--out {0}", r"--out must be a new directory, but {0} is not empty"),
    ],
)
def test_invalid_arguments_are_one_line(
    arguments: str, message: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--out", str(tmp_path), *arguments.format(inputs).split()]
    monkeypatch.setattr(sys, "argv", ["collect.py", *words])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(EXAMPLE / "collect.py"), run_name="__main__")
    assert re.fullmatch(f"collect.py: {message.replace('{0}', re.escape(str(inputs)))}", str(raised.value.code))
    assert not any(tmp_path.iterdir())


@needs_torch
def test_divergence_of_all_tokens_is_exact() -> None:
    import torch

    divergence = runpy.run_path(str(EXAMPLE / "train.py"))["divergence"]
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 3, 5, 11).log_softmax(-1)
    expected = float((teacher.exp() * (teacher - student)).sum(-1).mean())
    top = teacher.topk(11)
    assert float(divergence(student, top.indices, top.values)) == pytest.approx(expected, rel=1e-5)
    top = teacher.topk(4)
    assert 0 < divergence(student, top.indices, top.values) < expected
    assert float(divergence(teacher, top.indices, top.values)) == pytest.approx(0, abs=1e-6)


@needs_torch
def test_trained_student_is_closer_to_teacher(tmp_path: Path) -> None:
    data = tmp_path / "data"
    run("collect.py", "--out", data, "--texts", "96", "--length", "64", "-k", "8")
    same = run("train.py", "--data", data, "--out", tmp_path / "same", "--layers", "6", "--epochs", "1")
    assert float(re.findall(r"step 1 of 12: divergence (\S+),", same)[0]) < 1e-3
    run("train.py", "--data", data, "--out", tmp_path, "--epochs", "2")
    with (
        LLM(quantization="f32") as teacher,
        LLM(str(tmp_path / "untrained")) as before,
        LLM(str(tmp_path / "trained")) as after,
    ):
        untrained, trained = teacher.compare_each([before, after], TEXT)
        assert after.info()["layers"] == 3
    assert trained.kld.mean < untrained.kld.mean
