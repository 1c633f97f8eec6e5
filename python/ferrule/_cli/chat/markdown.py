"""Markdown of models: CommonMark with tables and strikethrough, drawn by rich, with what chats read otherwise."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import ClassVar

import rich.markdown
from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading as RichHeading
from rich.markdown import MarkdownElement, TableElement
from rich.table import Table as RichTable


class Heading(RichHeading):
    """A line at the left margin: neither centered nor framed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it."""
        self.text.justify = "left"
        yield self.text


class Table(TableElement):
    """Breaks words that are wider than their column, where rich would leave out the rest of them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it."""
        for table in super().__rich_console__(console, options):
            if isinstance(table, RichTable):
                for column in table.columns:
                    column.overflow = "fold"
            yield table


class Markdown(rich.markdown.Markdown):
    """Keeps line breaks, as poems and addresses want it; shows tags as they are, and addresses beside their links."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **rich.markdown.Markdown.elements,
        "heading_open": Heading,
        "table_open": Table,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _parser().parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def blocks(text: str) -> list[str]:
    """The blocks of a text, each with the empty lines after it: whatever follows, all but the last stay as they are.

    A line that is not whole begins none of its own: `3` would be a paragraph, and `3.` goes on with a list.
    """
    whole = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _parser().parse(whole) if token.level == 0 and token.map is not None]
    # Lines end at a newline alone, which str.splitlines sees otherwise.
    lines = text.split("\n")
    cuts = [0, *starts[1:], len(lines)]
    found = ["\n".join(lines[first:last]) for first, last in pairwise(cuts)]
    return [*(f"{block}\n" for block in found[:-1]), found[-1]]


@cache
def _parser() -> MarkdownIt:
    # Without HTML, which would not be shown at all: List<int> in the middle of a sentence is text.
    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
