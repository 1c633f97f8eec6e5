"""Rendering of Markdown with rich: CommonMark with tables and strikethrough, adapted to chats."""

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
    """Heading at the left margin; rich would center or frame it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the element."""
        self.text.justify = "left"
        yield self.text


class Table(TableElement):
    """Table that wraps words wider than their column, which rich would cut off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the element."""
        for table in super().__rich_console__(console, options):
            if isinstance(table, RichTable):
                for column in table.columns:
                    column.overflow = "fold"
            yield table


class Markdown(rich.markdown.Markdown):
    """Markdown with hard line breaks, HTML tags shown as text, and the URL beside each link."""

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
    """Splits a text into blocks with their trailing empty lines. Text that follows can change only the last block.

    An incomplete line does not start a block, since its kind may change: `3` is a paragraph, but `3.` may continue a
    list.
    """
    whole = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _parser().parse(whole) if token.level == 0 and token.map is not None]
    # Lines end at a newline only; str.splitlines also splits at other characters.
    lines = text.split("\n")
    cuts = [0, *starts[1:], len(lines)]
    found = ["\n".join(lines[first:last]) for first, last in pairwise(cuts)]
    return [*(f"{block}\n" for block in found[:-1]), found[-1]]


@cache
def _parser() -> MarkdownIt:
    # HTML is disabled, because rich would drop it: `List<int>` in a sentence is text.
    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
