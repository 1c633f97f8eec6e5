"""`ferrule bench --card`: a picture of the machine, the model and its speeds."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from ferrule._bench.card import card, machine_name
from ferrule._cli import main
from ferrule._pictures import write_picture

RECORD: dict[str, Any] = {
    "model": "org/<model> & more",
    "format": "int8",
    "isa": "avx2",
    "threads": 8,
    "batch": 1,
    "prefill_tokens": 512,
    "prefill_tokens_per_second": 1234.5,
    "decode_tokens_per_second": 56.78,
    "read_gbps": 34.2,
    "int8_gops": 1623.0,
    "f32_gflops": 400.0,
    "decode_bandwidth_fraction": 0.89,
    "prefill_peak_fraction": 0.56,
    "prefill_f32_fraction": 1.2,
}


def texts(picture: str) -> list[str]:
    """Returns the texts of a card, which must be valid XML."""
    return [element.text or "" for element in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_card_has_speeds_and_shares() -> None:
    shown = texts(card(RECORD, "A processor"))
    assert "org/<model> & more" in shown
    assert "A processor" in shown
    assert "int8 weights, 8 threads, avx2" in shown
    assert "56.8" in shown
    assert "1,234" in shown
    assert "89% of the read bandwidth, 34.2 GB/s" in shown
    assert "56% of the peak, 1623 GOPS" in shown


def test_formats_in_floating_point_are_compared_with_their_peak() -> None:
    picture = card({**RECORD, "format": "bf16", "batch": 4, "threads": 1}, "A processor")
    shown = texts(picture)
    assert "120% of the peak, 400 GFLOPS" in shown
    assert "after 512 tokens, 4 sequences" in shown
    assert "bf16 weights, 1 thread, avx2" in shown
    # The bar of a share above the limit ends at the limit.
    widths = [float(element.get("width", "0")) for element in ET.fromstring(picture) if element.tag.endswith("rect")]
    assert max(widths[1:]) == 720


def test_long_names_are_cut() -> None:
    shown = texts(card({**RECORD, "model": "m" * 200}, "p" * 200))
    assert all(len(text) <= 46 for text in shown)


def test_the_command_draws_a_card(fake_engine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--context", "16", "--gen", "4", "--repeat", "1"]
    assert main(arguments) == 0
    assert "--card FILE.svg draws these speeds" in capsys.readouterr().out
    file = tmp_path / "card.svg"
    assert main([*arguments, "--card", str(file)]) == 0
    assert "--card" not in capsys.readouterr().out
    assert machine_name()[:20] in file.read_text(encoding="utf-8")


def test_a_card_may_be_a_png_of_twice_the_size(tmp_path: Path) -> None:
    write_picture(card(RECORD, "A processor"), tmp_path / "card.png")
    write_picture(card({**RECORD, "model": ""}, "A processor"), tmp_path / "unnamed.png")
    named, unnamed = imread(tmp_path / "card.png"), imread(tmp_path / "unnamed.png")
    assert named.shape[:2] == unnamed.shape[:2] == (800, 1600)
    assert (named != unnamed).any()  # the text was drawn


def test_a_png_without_its_packages_is_refused_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert main(["bench", "--card", str(tmp_path / "card.png")]) == 2
    assert capsys.readouterr().err == "error: PNG pictures require ferrule[plot]: pip install 'ferrule[plot]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "x.pdf"], "card must be a file name that ends in .png or .svg, got 'x.pdf'"),
        (["--card", "/no/such/folder/x.svg"], "card must be a file in an existing directory, got"),
        (["--machine", "--card", "x.svg"], "--card has no effect with --machine"),
    ],
)
def test_invalid_cards(
    arguments: list[str], message: str, fake_engine: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
