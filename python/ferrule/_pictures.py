"""Pictures that are drawn as SVG: colors, texts, and the file, which may also be PNG with the extra `plot`."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ferrule.errors import InvalidParameterError, MissingDependencyError

SUFFIXES = (".png", ".svg")
BACKGROUND, TEXT, MUTED, LINE, HIGHLIGHT = "#17181b", "#e9e4d9", "#aba598", "#35383e", "#e3b45c"


def check_file(option: str, path: Path) -> None:
    """Checks the name of a picture and its directory. Raises InvalidParameterError."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidParameterError(option, str(path), f"a file name that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InvalidParameterError(option, str(path), "a file in an existing directory")


def check_picture(option: str, path: Path) -> None:
    """Checks that a picture can be written to `path`, before anything is measured.

    Raises InvalidParameterError; MissingDependencyError for PNG without the extra `plot`.
    """
    check_file(option, path)
    if path.suffix.lower() == ".png":
        _png(opening(1, 1, "") + "</svg>")


def write_picture(svg: str, path: Path) -> None:
    """Writes a picture as SVG or PNG, by the suffix of the file.

    Raises OSError, and the errors of `check_picture`.
    """
    if path.suffix.lower() == ".png":
        path.write_bytes(_png(svg))
    else:
        path.write_text(svg, encoding="utf-8")


def _png(svg: str) -> bytes:
    """Returns a picture as PNG, with two pixels for each unit, and with matplotlib's font: a server may have none."""
    try:
        import matplotlib as mpl
        import resvg_py
    except ImportError as error:
        raise MissingDependencyError("PNG pictures require ferrule[plot]: pip install 'ferrule[plot]'") from error
    fonts = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return resvg_py.svg_to_bytes(
        svg, zoom=2, skip_system_fonts=True, font_dirs=[str(fonts)], sans_serif_family="DejaVu Sans"
    )


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
