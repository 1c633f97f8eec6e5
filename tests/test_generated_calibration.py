"""Calibration with text that the model generates: lower loss on held-out text, the same every time, and its limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from conftest import TINY
from ferrule import InvalidParameterError, UnsupportedTaskError, allocate_bits, generate_calibration, quantize
from ferrule._api.generated_calibration import LENGTH
from ferrule._cli import main
from ferrule._loading import read_model_files
from ferrule._text.tokenizer import Tokenizer
from test_calibration import GOLDEN, SCORED, log_probabilities, stdlib_text, tensors

pytestmark = pytest.mark.native


def test_generated_text_reduces_divergence_on_held_out_text(tmp_path: Path) -> None:
    ids = Tokenizer(TINY).encode(stdlib_text(SCORED), add_special_tokens=False)
    windows = [ids[start : start + 256] for start in range(0, len(ids) - 256, 1024)][:16]
    exact = log_probabilities(None, windows, quantization="f32")

    def divergence(model: Path) -> float:
        return float((np.exp(exact) * (exact - log_probabilities(model, windows))).sum(axis=-1).mean())

    generated = generate_calibration(None, 4096)
    calibrated = quantize(
        None,
        tmp_path / "calibrated",
        recipe=allocate_bits(None, 4.25, calibrate=generated).recipe(),
        calibrate=generated,
    )
    rounded = quantize(None, tmp_path / "rounded", recipe=allocate_bits(None, 4.25).recipe())
    found, usual = divergence(calibrated), divergence(rounded)
    assert found < 0.7 * usual, f"{found} of {usual}"


def test_generated_text_is_the_same_every_time_and_within_its_limits() -> None:
    seen: list[tuple[int, int]] = []
    first = generate_calibration(None, 70 * LENGTH + 1, progress=lambda done, total: seen.append((done, total)))
    assert first == generate_calibration(None, 70 * LENGTH + 1, threads=1)
    assert [len(sequence) for sequence in first] == 70 * [LENGTH]
    assert len({sequence[0] for sequence in first}) > 60, "random first tokens"
    assert first[:10] == generate_calibration(None, 10 * LENGTH), "fewer tokens are a part of more"
    total = 70 * (LENGTH - 1)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[0][0] < total
    assert seen[-1] == (total, total)
    assert len(generate_calibration(None, 1)) == 1


def test_generated_text_begins_with_the_special_tokens_of_a_prompt(tmp_path: Path) -> None:
    model = tmp_path / "bos"
    shutil.copytree(TINY, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    bos = list(Tokenizer(model).first_ids)
    assert bos
    sequences = generate_calibration(model, 4 * LENGTH)
    assert all(sequence[: len(bos)] == bos and len(sequence) == LENGTH for sequence in sequences)


def test_models_without_text_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedTaskError, match=r"mean entropy of its predictions is 5\.\d+ nats, where 0\.05 to 4\.77"
    ):
        generate_calibration(GOLDEN / "llama", 512)
    encoder = GOLDEN.parent / "encoders" / "bert"
    with pytest.raises(UnsupportedTaskError, match="does not generate text for calibration"):
        generate_calibration(encoder)
    with pytest.raises(InvalidParameterError, match="tokens must be"):
        generate_calibration(None, 0)
    packed = quantize(None, tmp_path / "packed", format="int8")
    with pytest.raises(InvalidParameterError, match="an unpacked model"):
        generate_calibration(packed)


def test_command_calibrates_with_generated_text_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, *arguments: str, status: int = 0) -> str:
        assert main(["quantize", *arguments, "-o", str(tmp_path / name)]) == status
        return capsys.readouterr().err

    few = ("--calibration-tokens", "512")
    saved = tmp_path / "recipe.toml"
    assert "not calibrated" not in run("bits", "--bits", "4.25", "--save-recipe", str(saved), *few)
    sequences = generate_calibration(None, 512)
    expected = quantize(None, tmp_path / "expected", recipe=saved, calibrate=sequences)
    assert tensors(tmp_path / "bits") == tensors(expected)
    run("rounded", "--bits", "4.25", "--save-recipe", str(saved), "--no-self-calibrate")
    expected = quantize(None, tmp_path / "nearest", recipe=saved)
    assert tensors(tmp_path / "rounded") == tensors(expected)
    run("int4", "--format", "int4", "--self-calibrate", *few)
    expected = quantize(None, tmp_path / "int4-expected", format="int4", calibrate=sequences)
    assert tensors(tmp_path / "int4") == tensors(expected)

    random = str(GOLDEN / "llama")
    assert "not calibrated: " in run("random", random, "--bits", "8")
    assert read_model_files(tmp_path / "random").packed == "int4"
    assert "mean entropy" in run("refused", random, "--self-calibrate", status=1)
    assert not (tmp_path / "refused").exists()
    text = tmp_path / "text.txt"
    text.write_text(stdlib_text(SCORED))
    both = run("both", "--self-calibrate", "--calibrate", str(text), status=2)
    assert "--self-calibrate cannot be used with --calibrate" in both


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "2"], "bits must be a number from "),
        (["--self-calibrate", "--format", "int8", "--sparsity", "0.1"], "sparsity must be 2:4 or >= 0.5 with int8"),
    ],
)
def test_what_is_refused_is_refused_before_text_is_generated(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def generate(*_: object, **__: object) -> None:
        raise AssertionError("text was generated")

    monkeypatch.setattr("ferrule._cli.quantize.generate_calibration", generate)
    assert main(["quantize", *arguments, "-o", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
