"""Python blocks and console blocks of README.md and docs/ run and print what the pages show.

test_docs_commands.py checks the commands that do not run in tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from page_blocks import OUTPUT, ROOT, blocks, commands, same_output
from serve_process import served

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
TESTED_ELSEWHERE = {"docs/add-an-architecture.md": "test_docs.py"}
"""Pages whose Python blocks run in a separate test that sets them up."""
SERVER = "localhost:8000"
"""Address of the server that the pages show."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Host and port of `ferrule serve`."""
    with served("-m", "ferrule", "serve", "--port", "0") as url:
        yield url.removeprefix("http://")


@pytest.fixture
def listening(page: str, request: pytest.FixtureRequest) -> str:
    """Returns the address of a running server if the page uses one; else the address on the page."""
    asks = any(SERVER in block.text for block in blocks(ROOT / page) if block.language in ("python", "console"))
    return request.getfixturevalue("server") if asks else SERVER


def python_pages() -> list[str]:
    return [
        page
        for page in PAGES
        if page not in TESTED_ELSEWHERE and any(block.language == "python" for block in blocks(ROOT / page))
    ]


@pytest.mark.native
@pytest.mark.parametrize("page", python_pages())
def test_python_blocks_run(
    page: str, listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in blocks(ROOT / page):
        if block.language == "python":
            # Tracebacks show lines of the page.
            code = compile("\n" * (block.line - 1) + block.text.replace(SERVER, listening), f"{page}", "exec")
            exec(code, names)
            printed = capsys.readouterr().out
        elif block.title == OUTPUT:
            assert same_output(block.text, printed), f"{page}:{block.line} shows otherwise than\n{printed}"


def console_pages() -> list[str]:
    return [page for page in PAGES if any(block.language == "console" for block in blocks(ROOT / page))]


@pytest.mark.native
@pytest.mark.parametrize("page", console_pages())
def test_console_blocks_run(page: str, listening: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    for block in blocks(ROOT / page):
        if block.language != "console":
            continue
        for command, shown in commands(block):
            done = subprocess.run(
                ["bash", "-c", command.replace(SERVER, listening)],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            where = f"{page}:{block.line}: {command}"
            if shown.startswith("error: "):
                assert done.returncode in (1, 2), where
                assert same_output(shown, done.stderr), where + done.stderr
                continue
            assert done.returncode == 0, where + done.stderr
            assert not shown or same_output(shown, done.stdout), where + done.stdout


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 1.25\n…\nz", "a 1.26\nb\nc\nz\n", True),
        ("a 1.25", "a 2.25", False),
        ("a 1", "a 2", False),
        ("a.c", "abc", False),
        ("x …", "x 12 3", True),
    ],
)
def test_output_comparison(shown: str, printed: str, same: bool) -> None:
    assert same_output(shown, printed) is same
