"""`ferrule explain --html`: one page with the answer, the candidates and the sampler stages, and without requests."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fakes
import ferrule
from ferrule import SamplingParams
from ferrule._cli import main
from ferrule._cli.explain_page import CERTAINTY_LABELS, CERTAINTY_LIMITS, certainty_level, explanation_page
from ferrule.outputs import Candidate, Explanation, StageEffect

HOSTILE = "<script>alert(1)</script>&\"'"


class Page(HTMLParser):
    """Parses a page to its tags, its attributes and the text of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def explained(text: str, probability: float, *, stages: tuple[str, ...] = ()) -> Explanation:
    """Returns a step that sampled `text`, and had another candidate that a stage dropped."""
    shares = [probability for _ in stages]
    chosen = Candidate(7, text, 1.5, probability, probability, None, shares)
    other = Candidate(8, "other", 0.5, 0.01, 0.0, "top_k", [0.0 for _ in stages])
    return Explanation(3, 7, text, 0.25, [chosen, other], [StageEffect(name, 12, 0.5) for name in stages])


def page(*steps: Explanation, prompt: str = "Once", model: str = "tiny") -> str:
    return explanation_page(model, prompt, [(1, prompt)], SamplingParams(temperature=0.8, seed=3), steps)


def test_the_command_writes_a_page(
    fake_engine: type[fakes.Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.html"
    assert main(["explain", "The capital of", "-n", "2", "--temperature", "1", "--html", str(file)]) == 0
    assert capsys.readouterr().out == f"The explanation is in {file}.\n"
    read = Page(file.read_text(encoding="utf-8"))
    assert [attributes["id"] for tag, attributes in read.tags if tag == "section"] == ["token-1", "token-2"]
    assert "top_k" in read.text


def test_a_missing_directory_is_refused_before_anything_is_generated(
    fake_engine: type[fakes.Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "The capital of", "--html", "/no/such/folder/x.html"]) == 2
    error = capsys.readouterr().err
    assert error == "error: html must be a file in an existing directory, got '/no/such/folder/x.html'\n"


def test_the_page_has_candidates_and_stages() -> None:
    read = Page(page(explained(" upon", 0.95), explained(" a", 0.05, stages=("top_k", "min_p"))))
    links = [attributes for tag, attributes in read.tags if tag == "a"]
    assert [(link["href"], link["data-certainty"], link["title"]) for link in links] == [
        ("#token-1", "0", "95.00%"),
        ("#token-2", "4", "5.00%"),
    ]
    words = " ".join(read.text.split())
    assert "Once upon a" in words
    assert "dropped by top_k" in words
    assert re.search(r"stage ?tokens left ?entropy", words)
    assert "min_p" in words
    assert "The random number 0.2500 selects ' a'" in words


def test_texts_are_escaped() -> None:
    text = page(explained(HOSTILE, 0.5, stages=(HOSTILE,)), prompt=HOSTILE, model=HOSTILE)
    read = Page(text)
    tags = {tag for tag, _ in read.tags}
    assert tags.isdisjoint({"script", "img", "iframe", "link", "base", "form"})
    assert read.text.count("<script>alert(1)</script>") >= 5
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]


def test_the_page_loads_nothing() -> None:
    text = page(explained("x", 0.5))
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|url\(|@import|\bsrc=", text)


def test_levels_are_those_of_the_chat_page() -> None:
    assert [certainty_level(each) for each in (1.0, 0.9, 0.89, 0.5, 0.2, 0.1, 0.01, None)] == [0, 0, 1, 2, 3, 3, 4, 4]
    script = (Path(ferrule.__file__).parent / "server" / "page" / "js" / "tokens.js").read_text(encoding="utf-8")
    limits = re.search(r"CERTAINTY_LIMITS = \[(.*)\];", script)
    assert limits is not None
    assert tuple(map(float, limits[1].split(","))) == CERTAINTY_LIMITS
    assert ", ".join(f'"{label}"' for label in CERTAINTY_LABELS) in script
