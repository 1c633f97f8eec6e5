"""`ferrule eval --compare`: several formats of a model in a table, a record and a picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from ferrule import InsufficientMemoryError
from ferrule._cli import main
from ferrule._cli.eval_formats import candidates, spread
from ferrule._evaluation.chart import chart

TEXT = "Once upon a time, there was a little cat. The capital of France is Paris.\n" * 20


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def record(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def points(picture: str) -> tuple[list[float], list[str]]:
    """Returns the heights of the points in the area of the chart, and all texts; the picture must be valid XML."""
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(picture)
    circles = [circle for circle in root.iter(f"{svg}circle") if circle.get("cx") != "49.0"]
    return [float(circle.get("cy", "")) for circle in circles], [each.text or "" for each in root.iter(f"{svg}text")]


@pytest.mark.native
def test_formats_of_the_embedded_model(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "formats.svg"
    made = record(
        capsys,
        file,
        "--window",
        "64",
        "--limit",
        "6",
        "--max-model-len",
        "64",
        "--plot",
        str(picture),
        "--compare",
        "int4",
        "int8",
    )
    plain = record(
        capsys, file, "--window", "64", "--limit", "6", "--quantization", "int4", "--reference-quantization", "f32"
    )
    int4, int8 = made["formats"]
    assert (int4["name"], int8["name"], made["reference"]["name"]) == ("int4", "int8", "f32")
    for field in ("kld", "same_top", "perplexity", "perplexity_ratio", "weight_bytes", "tokens"):
        assert int4[field] == plain[field], field
    assert made["reference"]["perplexity"] == plain["reference"]["perplexity"]
    assert int4["weight_bytes"] < int8["weight_bytes"] < made["reference"]["weight_bytes"]
    assert int4["bits_per_weight"] == pytest.approx(4.85, abs=0.1)
    assert all(each[f"{part}_tokens_per_second"] > 0 for each in (int4, int8) for part in ("prefill", "decode"))
    [worse, better], texts = points(picture.read_text(encoding="utf-8"))
    assert worse < better, "a larger divergence is drawn higher"
    assert {"int4", "int8", "f32", "4.85"} <= set(texts)


def test_table(file: str, fake_engine: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "tiny", file, "--compare", "int8", "int4@tiny", "tiny", "int8", "--window", "64"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("reference: tiny  f32 weights")
    assert [line.split()[0] for line in lines[2:7]] == ["format", "f32", "int8", "int4@tiny", "tiny"]
    assert "windows of 64, stride 32" in lines[-1]
    assert max(map(len, lines)) <= 100


def test_reference_of_another_format(file: str, fake_engine: object, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--reference-quantization", "bf16", "--compare", "int8", "--window", "64", "--reference", "tiny")
    made = record(capsys, file, *words)
    assert (made["reference"]["name"], made["reference"]["quantization"]) == ("bf16@tiny", "bf16")


def test_a_model_with_a_shorter_context(
    file: str, fake_engine: object, model_with: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    short = str(model_with({"max_position_embeddings": 256}))
    made = record(capsys, file, "--window", "64", "--compare", "int8", short)
    int8, other = made["formats"]
    assert (int8["prefill_tokens"], int8["decode_tokens"]) == (512, 128)
    assert other["prefill_tokens"] == 256 - 128
    assert int8["tokens"] == other["tokens"]


def test_models_of_the_same_name_have_the_given_words(model_with: Callable[..., Path], tmp_path: Path) -> None:
    config = (model_with() / "config.json").read_text()
    folders = [tmp_path / parent / "same" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
    given = [*map(str, folders), "int8", "int8@tiny"]
    assert [each.name for each in candidates(None, given)] == given


def test_a_format_with_another_vocabulary(
    file: str, fake_engine: object, model_with: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(model_with({"vocab_size": 4000}))
    assert main(["eval", file, "--window", "64", "--compare", "int8", other]) == 2
    assert "4000" in capsys.readouterr().err


def test_insufficient_memory_for_all_formats(
    file: str, fake_engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    init = fake_engine.__init__

    def too_large(self: fakes.Engine, spec: str, model_dir: str, options: str, *more: Any, **keywords: Any) -> None:
        if json.loads(options)["quantization"] == "int4":
            raise InsufficientMemoryError("the weights need 9 bytes; 8 are available")
        init(self, spec, model_dir, options, *more, **keywords)

    monkeypatch.setattr(fake_engine, "__init__", too_large)
    assert main(["eval", file, "--window", "64", "--compare", "int8", "int4"]) == 1
    message = "not enough memory for the reference and all formats at once: the weights need 9 bytes; 8 are available"
    assert message in capsys.readouterr().err


def test_values_end_at_the_next_option() -> None:
    assert spread(["x", "--compare", "a", "b", "--json"]) == ["x", "--compare", "a", "--compare", "b", "--json"]
    assert spread(["--compare", "a", "--compare", "b", "--", "c"]) == ["--compare", "a", "--compare", "b", "--", "c"]
    assert spread(["--compare=a", "b", "--compare"]) == ["--compare=a", "--compare", "b", "--compare"]


@pytest.mark.parametrize("kld", [[0.0], [None], [1e-9, 3e-9], [1.0, 1.0], [0.2, None, 40.0]])
def test_extreme_divergences_are_inside_the_area(kld: list[float | None]) -> None:
    def row(name: str, mean: float | None) -> dict[str, Any]:
        return {
            "name": name,
            "model": "org/<model>",
            "isa": "avx2",
            "threads": 2,
            "tokens": 1000,
            "weight_bytes": 88_700_000,
            "bits_per_weight": 4.85,
            "perplexity": None,
            "same_top": 0.5,
            "prefill_tokens_per_second": 1000.0,
            "decode_tokens_per_second": 50.0,
            "kld": {"mean": mean},
        }

    reference = {name: value for name, value in row("f32", 0).items() if name != "kld"}
    made = {"reference": reference, "formats": [row(f"format {i}", mean) for i, mean in enumerate(kld)]}
    heights, texts = points(chart(made, "A processor"))
    assert len(heights) == sum(mean is not None for mean in kld)
    assert all(110 <= height <= 380 for height in heights)
    assert "<model>" in texts
