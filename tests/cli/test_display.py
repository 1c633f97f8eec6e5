"""Answers as markdown: the final screen does not depend on how the text is split, and nothing is drawn twice."""

from __future__ import annotations

import io
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cli.terminal import Screen
from ferrule._cli.chat.answers import Delta
from ferrule._cli.chat.display import INTERVAL, MarkdownDisplay, PlainDisplay, display
from ferrule._cli.chat.markdown import blocks

BLOCKS = [
    "# A title",
    "Some *words* and `code`, List<int> among them.\nA second line.",
    "1. one\n2. two\n\n   inside\n\n3. three",
    "- a\n  - b\n- c",
    "```python\ndef f(x):\n\n    return x\n```",
    "~~~\n" + "\n".join(f"line {number}" for number in range(30)) + "\n~~~",
    "| a | b |\n|---|---|\n| 1 | a longer cell |\n| 2 | **bold** |",
    "> a quotation\n> of two lines",
    "    indented code\n\n    and more",
    "---",
    "Words " * 40,
    "A [link](http://example.org) and ~~this~~.",
    "日本語のテキスト " * 9,
    "**never closed",
]


class Recorded:
    """A display with its own screen buffer."""

    def __init__(self, height: int, width: int) -> None:
        self.file = io.StringIO()
        console = Console(
            file=self.file,
            force_terminal=True,
            color_system="standard",
            width=width,
            height=height,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )
        self.display = MarkdownDisplay(console)
        self.display._interval = -1.0  # every delta is drawn

    def screen(self, height: int, width: int) -> Screen:
        screen = Screen(height, 2 * width)  # wide characters take two columns and are one here
        screen.write(self.file.getvalue())
        return screen


def shown(deltas: list[Delta], height: int = 12, width: int = 40) -> str:
    recorded = Recorded(height, width)
    for delta in deltas:
        recorded.display.add(delta)
        recorded.display._interval = -1.0
    recorded.display.close()
    return recorded.screen(height, width).text()


@settings(max_examples=40)
@given(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6), st.integers(1, 40), st.sampled_from([20, 40, 80]))
def test_output_is_independent_of_chunk_boundaries(blocks: list[str], size: int, width: int) -> None:
    text = "\n\n".join(blocks)
    whole = shown([Delta(text)], width=width)
    cut = shown([Delta(text[start : start + size]) for start in range(0, len(text), size)], width=width)
    assert cut == whole
    assert whole.strip()


def test_redrawn_area_fits_on_screen() -> None:
    text = "```\n" + "\n".join(f"line {number}" for number in range(100))
    recorded = Recorded(10, 40)
    for start in range(0, len(text), 7):
        recorded.display.add(Delta(text[start : start + 7]))
        recorded.display._interval = -1.0
        assert len(recorded.display._drawn) <= 9
    recorded.display.close()
    screen = recorded.screen(10, 40)  # which fails where the cursor would have to leave it
    assert [line.strip() for line in screen.lines if line.strip()] == [f"line {number}" for number in range(100)]


def test_every_character_is_shown_once() -> None:
    text = shown(
        [Delta("First para\ngraph.\n\nSecond, with <b>tags</b> and vector<int>."), Delta("\n\n- item\n")], width=60
    )
    assert text == "First para\ngraph.\n\nSecond, with <b>tags</b> and vector<int>.\n\n • item\n"


def test_reasoning_is_styled_differently() -> None:
    recorded = Recorded(12, 40)
    for delta in (Delta(reasoning="Let me"), Delta(reasoning=" think\nof it"), Delta("Paris.")):
        recorded.display.add(delta)
        recorded.display._interval = -1.0
    recorded.display.close()
    assert recorded.screen(12, 40).text() == "Let me think\nof it\n\nParis.\n"
    assert "\x1b[2mof it" in recorded.file.getvalue()  # dim


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x1b[2J", "a\rb", "\x9b2J", "\x00"])
def test_control_sequences_in_answer_are_removed(text: str) -> None:
    screen = Screen(12, 40)
    recorded = Recorded(12, 40)
    recorded.display.add(Delta(f"before {text} after", reasoning=text))
    recorded.display.close()
    screen.write(recorded.file.getvalue())  # which knows none of these
    assert "after" in screen.text()
    assert not {"\x1b]", "\x1b[2J", "\x9b", "\x00", "\x07"} & set(recorded.file.getvalue())


def test_pending_text_is_drawn_during_pause() -> None:
    recorded = Recorded(12, 40)
    recorded.display._interval = INTERVAL
    recorded.display.add(Delta("first "))
    recorded.display.add(Delta("second"))
    deadline = time.monotonic() + 180
    while "second" not in recorded.file.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    recorded.display.close()


def test_cursor_movement_follows_terminal_width() -> None:
    recorded = Recorded(12, 40)
    recorded.display.add(Delta("word " * 7))
    assert recorded.display._up() == "\r"
    recorded.display._console.width = 10
    assert recorded.display._up() == "\r\x1b[3A"  # 34 columns are four lines of ten


@pytest.mark.parametrize(
    "found",
    [
        [""],
        ["one"],
        ["one\n\ntwo"],
        ["one\n\n", "two\nth"],
        ["1. one\n\n2"],
        ["one\n\n", "```\na\n\nb"],
        ["- a\n\n- b\n\n  c\n\n", "d\n"],
        ["one\x0btwo\n\n", "# three\n", "four\n\n\n"],
    ],
)
def test_text_is_split_into_markdown_blocks(found: list[str]) -> None:
    assert blocks("".join(found)) == found


def test_pipe_receives_only_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    answer = display(plain=False)
    assert isinstance(answer, PlainDisplay)
    for delta in (Delta(reasoning="Hm."), Delta("# Paris\x1b[0m\r\n")):
        answer.add(delta)
    answer.close()
    assert capsys.readouterr().out == "# Paris\x1b[0m\r\n\n"  # a pipe is no terminal: byte for byte


@pytest.mark.parametrize("width", [14, 30, 80])
def test_narrow_table_keeps_all_text(width: int) -> None:
    rows = "| name | how |\n|---|---|\n| an incomprehensible one | incontrovertibly |\n"
    text = shown([Delta(rows)], height=40, width=width)
    assert sorted(re.sub(r"[\s─]", "", text)) == sorted(re.sub(r"[\s|-]", "", rows))
