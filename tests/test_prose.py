"""tools/check_prose.py: findings, text that it accepts, and exit codes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "check_prose.py"

spec = importlib.util.spec_from_file_location("check_prose", TOOL)
assert spec is not None
assert spec.loader is not None
check_prose = importlib.util.module_from_spec(spec)
sys.modules["check_prose"] = check_prose
spec.loader.exec_module(check_prose)


def findings(folder: Path, name: str, source: str) -> list[tuple[int, str]]:
    """Line and rule of each finding in a file with this content."""
    path = folder / name
    path.write_text(source)
    return [(found.line, found.rule) for found in check_prose.check_file(path, name)]


@pytest.mark.parametrize(
    ("summary", "rule"),
    [
        ("Of its weights.", "leaning-summary"),
        ("Those that wait.", "leaning-summary"),
        ("Its name in ggml.", "leaning-summary"),
        ("It sampled one of its stop ids.", "leaning-summary"),
        ("How many leading positions have keys.", "clause-summary"),
        ("What a request may ask for.", "clause-summary"),
        ("Where adapters may find their place.", "clause-summary"),
        ("For messages.", "fragment-summary"),
        ("By group, outputs in AWQ's order.", None),
        ("Without a bias.", "fragment-summary"),
        ("Every token's.", "fragment-summary"),
        ("Number of tokens in the prompt.", None),
        ("Returns the number of tokens.", None),
        ("How to add an architecture.", None),
        ("In a stream, the last delta has the finish reason.", None),
        ("Offset of the first token.", None),
        ("The rotary embedding.", None),
        ("Item of a list.", None),
    ],
)
@pytest.mark.parametrize("language", ["python", "attribute", "rust", "help"])
def test_summary_lines(summary: str, rule: str | None, language: str, tmp_path: Path) -> None:
    name, source, line = {
        "python": ("a.py", f'"""A module."""\ndef f() -> None:\n    """{summary}\n\n    Of more.\n    """\n', 3),
        "attribute": ("a.py", f'LIMIT = 1\n"""{summary}"""\n', 2),
        "rust": ("a.rs", f"struct Needs {{\n    /// {summary}\n    ///\n    /// Of more.\n    weights: u64,\n}}\n", 2),
        "help": ("a.py", f'import click\noption = click.option("--x", help="{summary}")\n', 2),
    }[language]
    assert findings(tmp_path, name, source) == ([(line, rule)] if rule else [])


@pytest.mark.parametrize(
    "phrase",
    [
        "the body is no JSON",
        "`x` is no name of a model",
        "all but for one",
        "so long a prompt",
        "a command line that cannot be.",
        "which a role has not.",
        "the parent is told of it",
        "the engine parts with pages",
        "a guess that came true",
        "as many requests wait as may",
        "where a format is asked for",
        "lest it fails",
        "disowned pages",
        "a mixture has experts",
        "the moments of a layer",
        "the pair is turned",
        "packed anew",
    ],
)
@pytest.mark.parametrize("place", ["docstring", "comment", "message", "f-string", "rustdoc", "rust", "page", "make"])
def test_phrases_are_found(phrase: str, place: str, tmp_path: Path) -> None:
    name, source, line = {
        "docstring": ("a.py", f'def f() -> None:\n    """Summary.\n\n    Here {phrase}\n    """\n', 4),
        "comment": ("a.py", f"x = 1  # {phrase}\n", 1),
        "message": ("a.py", f'\nraise ValueError("{phrase}")\n', 2),
        "f-string": ("a.py", f'x = 1\nraise ValueError(f"{{x}}: {phrase}")\n', 2),
        "rustdoc": ("a.rs", f"/// Summary.\n///\n/// Then {phrase}\nfn f() {{}}\n", 3),
        "rust": ("a.rs", f'fn f() {{\n    panic!("{phrase}");\n}}\n', 2),
        "page": ("a.md", f"# Title\n\nText.\n{phrase}\n", 4),
        "make": ("a.toml", f"# {phrase}\n", 1),
    }[place]
    assert {(line, "phrase")} == set(findings(tmp_path, name, source))


def test_phrase_across_line_break_has_first_line(tmp_path: Path) -> None:
    assert findings(tmp_path, "a.md", "One.\nall but\nfor one\n") == [(2, "phrase")]
    assert findings(tmp_path, "a.rs", "// All but\n// for one.\nfn f() {}\n") == [(1, "phrase")]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.md", "The option `so long a name`.\n"),
        ("a.md", "```text\nall but for one\n```\n"),
        ("a.rs", "/// ```\n/// let told_name = 1; // but for one\n/// ```\nfn f() {}\n"),
        ("a.rs", "fn f<'a>(x: &'a str) -> char { '\"' }\n"),
        ("a.py", 'x = "anew"\n'),
        ("a.py", "def returned_part_without_cancelling() -> None: ...\n"),
        ("a.md", "A mixture of experts. It is turned off. The tensor cannot be read.\n"),
    ],
)
def test_code_and_technical_terms_pass(name: str, source: str, tmp_path: Path) -> None:
    assert findings(tmp_path, name, source) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [("a.rs", "fn disown_pages() {}\n"), ("a.py", "def is_told() -> bool: ...\n"), ("a.js", "const twin = 1;\n")],
)
def test_glossary_names(name: str, source: str, tmp_path: Path) -> None:
    assert findings(tmp_path, name, source) == [(1, "name")]


def test_headings(tmp_path: Path) -> None:
    assert findings(tmp_path, "a.md", "# What loads\n\n## How inference works\n\n## Supported models\n") == [
        (1, "heading")
    ]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_command_exit_codes(tmp_path: Path) -> None:
    clean = run("LICENSE", "tools/check_prose.py")
    assert (clean.returncode, clean.stdout.strip()) == (0, "")
    missing = run("no/such/file")
    assert missing.returncode == 2
    assert "no/such/file does not exist" in missing.stderr


def test_findings_give_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "page.md").write_text("All but for one.\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "page.md"], check=True)
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    assert check_prose.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "page.md:1: phrase: 'but for'; write 'except'\n"
