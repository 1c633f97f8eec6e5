"""README.md: its length, links that also work on PyPI, and pictures that agree with commands and records."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.image import imread
from PIL import Image

from page_blocks import ROOT

README = (ROOT / "README.md").read_text()
BASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LINKS: list[str] = re.findall(r"\]\(([^)]*)\)", README)
PICTURES = ROOT / "docs" / "pictures"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "readme" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("link", LINKS)
def test_links_are_absolute_and_lead_to_files_of_the_repository(link: str) -> None:
    found = re.fullmatch(rf"{re.escape(BASE)}/(blob|raw|tree)/main/([^#]+)(?:#.*)?", link)
    assert found is not None, f"{link} is not below {BASE}"
    kind, path = found.groups()
    assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file(), path


def test_readme_has_only_inline_links() -> None:
    assert len(LINKS) > 15
    assert not re.search(r"<https?:|href=|\]\[|^\[.*\]:", README, re.MULTILINE), "only inline links are checked"


def test_readme_shows_make_demo_and_make_test() -> None:
    assert re.findall(r"^make (\w+)", README, re.MULTILINE) == ["demo", "test"]


@pytest.mark.native
def test_recording_equals_command_output(tmp_path: Path) -> None:
    recording = tool("recording")
    recording.main(tmp_path / "recording.svg")

    def shown(path: Path) -> list[str]:
        """Returns the words of the picture without the last digits of numbers, which depend on the instruction set."""
        texts = re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())
        return re.sub(r"\d+\.\d+", "0.0", html.unescape(" ".join(texts))).split()

    assert shown(PICTURES / "recording.svg") == shown(tmp_path / "recording.svg")
    for command in recording.COMMANDS:
        assert command.split()[1] in shown(PICTURES / "recording.svg")


def test_recording_has_no_external_urls() -> None:
    assert "url(http" not in (PICTURES / "recording.svg").read_text()


def test_chart_equals_benchmark_record() -> None:
    chart = tool("chart")
    with Image.open(PICTURES / "benchmark.png") as picture:
        described = dict(picture.info)
    assert described["Source"] == chart.RECORD
    assert json.loads(described["Comment"]) == chart.figures()
    assert str(Path(chart.RECORD).with_suffix(".md")) in README


def test_chart_is_drawn_by_its_script(tmp_path: Path) -> None:
    tool("chart").draw(tmp_path / "benchmark.png")
    assert imread(tmp_path / "benchmark.png").shape == imread(PICTURES / "benchmark.png").shape
