"""Parts of the pictures that are written as SVG without another package: colors, texts, and the check of the file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ferrule.errors import InvalidParameterError

BACKGROUND, TEXT, MUTED, LINE, HIGHLIGHT = "#17181b", "#e9e4d9", "#aba598", "#35383e", "#e3b45c"


def check_svg(option: str, path: Path) -> None:
    """Checks that a picture can be written to `path`, before anything is measured. Raises InvalidParameterError."""
    if path.suffix.lower() != ".svg":
        raise InvalidParameterError(option, str(path), "a file name that ends in .svg")
    if not path.parent.is_dir():
        raise InvalidParameterError(option, str(path), "a file in an existing directory")


def opening(width: int, height: int, summary: str) -> str:
    """Returns the opening tag, the title and the background of a picture of `width` x `height` pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui, sans-serif">\n<title>{escape(summary)}</title>\n'
        f'<rect width="{width}" height="{height}" rx="16" fill="{BACKGROUND}"/>'
    )


def text_at(
    x: float,
    y: float,
    size: int,
    color: str,
    text: str,
    *,
    most: int,
    weight: int = 400,
    anchor: str = "start",
) -> str:
    """Returns a line of text, cut after `most` characters."""
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}">'
        f"{escape(short)}</text>"
    )
