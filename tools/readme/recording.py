#!/usr/bin/env python3
"""Record a terminal session as an SVG for README.md.

Usage: recording.py [OUTPUT]. Runs each command of `COMMANDS` with the interpreter's own `ferrule`, and writes what a
terminal would show. The default OUTPUT is docs/pictures/recording.svg.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "docs" / "pictures" / "recording.svg"
WIDTH = 84
"""Columns of the terminal."""
COMMANDS = (
    'ferrule run "The capital of France is" --quiet',
    'ferrule run "The sky is" --choice blue,green --quiet',
    'ferrule explain "The capital of France is" -n 1 --top 3',
)

FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
    font-variant-east-asian: full-width;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own template without its web font: the picture fetches nothing."""


def run(command: str) -> str:
    """Returns what a command prints to a terminal of `WIDTH` columns, with its escape sequences."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.rstrip("\n")


def main(output: Path) -> None:
    """Runs the commands and writes the picture."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        for number, command in enumerate(COMMANDS):
            console.print(Text.assemble("\n" if number else "", ("$ ", "bold green"), (command, "bold")))
            console.print(Text.from_ansi(run(command)))
        # The id is derived from the contents by default; a fixed one keeps differences small.
        picture = console.export_svg(title="ferrule", theme=MONOKAI, code_format=FORMAT, unique_id="recording")
    output.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
