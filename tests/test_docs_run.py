"""README.md and every page of docs/: what of them can run runs and prints what they show, what cannot is spelt well."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from conftest import TINY
from ferrule._cli.app import app
from page_blocks import OUTPUT, ROOT, Block, blocks, commands, same_output
from serve_process import served

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "py", "console", "sh", "text", "json", "toml", "ini"}
"""`py` is Python that cannot run by itself."""
TESTED_ELSEWHERE = {"docs/add-an-architecture.md": "test_docs.py"}
"""Pages whose Python needs what a test of their own gives it."""
PLACEHOLDERS = (
    "org/repo",
    "path/to/",
    "./my-",
    "my-model",
    "Qwen/",
    "pip install",
    "MODEL",
    "wiki.test.raw",
    "in.jsonl",
    "--shape",
)
"""What makes a command one that cannot run in a test."""


SERVER = "localhost:8000"
"""Where pages say that a server listens."""
UNTIL_TOLD = ("ferrule serve", "ferrule chat")
"""Commands that run until they are told to end."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Host and port of `ferrule serve`."""
    with served("-m", "ferrule", "serve", "--port", "0") as url:
        yield url.removeprefix("http://")


@pytest.fixture
def listening(page: str, request: pytest.FixtureRequest) -> str:
    """Where the server listens, if the page asks one; else what stands on pages."""
    asks = any(SERVER in block.text for block in blocks(ROOT / page) if block.language in ("python", "console"))
    return request.getfixturevalue("server") if asks else SERVER


def test_the_languages_of_blocks_are_known() -> None:
    found = {(page, block.language) for page in PAGES for block in blocks(ROOT / page)}
    assert not [(page, language) for page, language in found if language not in LANGUAGES]


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_is_a_block(page: str) -> None:
    fences = re.findall(r"^\s*```", (ROOT / page).read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(ROOT / page))


def python_pages() -> list[str]:
    return [
        page
        for page in PAGES
        if page not in TESTED_ELSEWHERE and any(block.language == "python" for block in blocks(ROOT / page))
    ]


@pytest.mark.native
@pytest.mark.parametrize("page", python_pages())
def test_the_python_of_a_page_runs(
    page: str, listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in blocks(ROOT / page):
        if block.language == "python":
            # The page's own lines in tracebacks.
            code = compile("\n" * (block.line - 1) + block.text.replace(SERVER, listening), f"{page}", "exec")
            exec(code, names)
            printed = capsys.readouterr().out
        elif block.title == OUTPUT:
            assert same_output(block.text, printed), f"{page}:{block.line} shows otherwise than\n{printed}"


def console_pages() -> list[str]:
    return [page for page in PAGES if any(block.language == "console" for block in blocks(ROOT / page))]


@pytest.mark.native
@pytest.mark.parametrize("page", console_pages())
def test_the_commands_of_a_page_run(page: str, listening: str, tmp_path: Path) -> None:
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


def spelt_commands() -> list[tuple[str, str]]:
    """Commands of ferrule on pages that do not run, each with its page."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for block in blocks(ROOT / page):
            if block.language == "sh":
                lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
                found += [(page, line) for line in lines if line.startswith("ferrule ")]
    return found


@pytest.mark.parametrize(("page", "line"), spelt_commands())
def test_commands_that_do_not_run_are_spelt_well(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one of ferrule's, with options that it has."""
    monkeypatch.chdir(tmp_path)
    for part in re.sub(r"\s#.*", "", line).split("; "):
        words = shlex.split(part)
        for word in words:
            # Files that options read must be there when they are parsed.
            if re.fullmatch(r"[A-Z]+|[\w.]+\.(json|lark)", word):
                Path(word).touch()
            elif word.startswith(("path/to/", "./my-")) and not Path(word).exists():
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).symlink_to(TINY)
        group = click.Context(app, info_name="ferrule")
        command = app.get_command(group, words[1])
        assert command is not None, f"{page}: {line}"
        command.make_context(words[1], words[2:], parent=group)


@pytest.mark.parametrize(
    ("page", "block"), [(page, block) for page in PAGES for block in blocks(ROOT / page) if block.language == "sh"]
)
def test_what_can_run_does(page: str, block: Block) -> None:
    """A command that needs nothing but ferrule belongs into a console block."""
    for line in block.text.splitlines():
        if line.startswith("ferrule ") and not line.startswith(UNTIL_TOLD):
            assert any(word in line.partition(" #")[0] for word in PLACEHOLDERS), f"{page}: {line} can run: let it"


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
def test_outputs_are_compared(shown: str, printed: str, same: bool) -> None:
    assert same_output(shown, printed) is same
