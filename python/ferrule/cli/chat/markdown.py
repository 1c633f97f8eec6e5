"""Markdown of models: CommonMark with tables and strikethrough, drawn by rich, with what chats read otherwise."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import rich.markdown
from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading as RichHeading
from rich.markdown import MarkdownElement


class Heading(RichHeading):
    """A line at the left margin: neither centered nor framed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it."""
        self.text.justify = "left"
        yield self.text


class Markdown(rich.markdown.Markdown):
    """Keeps line breaks, as poems and addresses want it; shows tags as they are, and addresses beside their links."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **rich.markdown.Markdown.elements,
        "heading_open": Heading,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _parser().parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def last_block(text: str) -> int:
    """Where the last block of a text begins: whatever follows, the blocks before it stay as they are."""
    starts = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map is not None]
    if not starts:
        return 0
    # Lines end at a newline alone, which str.splitlines sees otherwise.
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]])


@cache
def _parser() -> MarkdownIt:
    # Without HTML, which would not be shown at all: List<int> in the middle of a sentence is text.
    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
