"""The fenced blocks of a page, and whether what ran printed what the page shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
OUTPUT = "Output"
"""The title of a block that shows what the block of Python before it prints."""
DECIMAL = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    """`python`: runs. `console`: its lines after `$` run. `sh`: commands that cannot run here. Others only show."""
    title: str | None
    text: str
    line: int
    """Number of its first line in the page."""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(found["language"], found["title"], found["text"], text.count("\n", 0, found.start()) + 2)
        for found in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown; lines after `> ` go on with a command."""
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif line.startswith("> ") and not found[-1][1]:
            found[-1] = (found[-1][0] + line[2:], "")
        else:
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def same_output(shown: str, printed: str) -> bool:
    """Whether what was printed is what is shown.

    `…` stands for anything. Numbers with decimals may be off in the last places: instruction sets add in different
    orders, and what is quantized differs by as much.
    """
    shown, printed = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (shown, printed))
    pattern = "".join(
        ".*" if part == "…" else f"({DECIMAL.pattern})" if DECIMAL.fullmatch(part) else re.escape(part)
        for part in re.split(f"({DECIMAL.pattern}|…)", shown)
    )
    found = re.fullmatch(pattern, printed, re.DOTALL)
    if found is None:
        return False
    numbers = [float(number) for number in DECIMAL.findall(shown)]
    return all(
        abs(float(got) - number) <= max(0.02, 0.02 * number)
        for got, number in zip(found.groups(), numbers, strict=True)
    )
