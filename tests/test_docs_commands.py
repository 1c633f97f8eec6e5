"""Every command in README.md, docs/ and the other Markdown files exists and has arguments that its program accepts.

Blocks of `console` run in test_docs_run.py. Blocks of `sh` contain commands that a test cannot run; each of them is
parsed by the program's own parser. `NOT_RUN` gives the reason for each kind.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from conftest import TINY
from ferrule._cli.app import app
from page_blocks import ROOT, Block, blocks

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    *sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("benches", "examples", "tools", "python/ferrule/models")
        for path in (ROOT / folder).rglob("*.md")
        if ".work" not in path.parts
    ),
]
LANGUAGES = {"python", "py", "console", "sh", "text", "json", "toml", "ini"}
"""`py` is Python that needs a model, a network or another program."""

NOT_RUN = {
    "ferrule": "needs a model of the reader, the network, a terminal, or minutes",
    "make": "builds for minutes; the rules are expanded instead",
    "pip": "needs the network",
    "cargo": "builds for minutes",
    "python": "a benchmark or a training run of minutes to hours; needs models or PyTorch",
    "benches/peers/compare.py": "installs and measures other engines for minutes",
    "benches/peers/install": "needs the network",
    "source": "changes the shell of the reader",
    "eval": "changes the shell of the reader",
    "export": "changes the shell of the reader",
}
"""Reason that commands of a program do not run in a test; the first word of a command is a key of `CHECKS`."""

NEEDS_TORCH = ("tools/make_golden/", "tools/train_tiny/", "examples/distill/train.py")
"""Scripts whose imports a developer's environment lacks: they must exist, their arguments are not parsed."""

UNTIL_INTERRUPTED = ("ferrule serve", "ferrule chat")
"""Commands that run until the user stops them."""
EXTERNAL = (
    "org/repo",
    "path/to/",
    "./my-",
    "my-model",
    "Qwen/",
    "SmolVLM-",
    "MODEL",
    "wiki.test.raw",
    "in.jsonl",
    "--shape",
    "smollm2:",
    "qwen3:",
    "llama3.2:",
)
"""Parts of ferrule commands that need a model, a file or minutes that a test does not have."""


def sh_blocks() -> list[tuple[str, Block]]:
    return [(page, block) for page in PAGES for block in blocks(ROOT / page) if block.language == "sh"]


def simple_commands(text: str) -> Iterator[list[str]]:
    """Words of each simple command in a block, without comments, assignments and redirections."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        skipped = False
        for word in [*lexer, ";"]:
            if word and set(word) <= set(";|&"):
                if words:
                    yield words
                words = []
            elif word in ("<", ">", ">>"):
                skipped = True
            elif skipped:
                skipped = False
            elif words or not re.match(r"\w+=", word):
                words.append(word)


def all_commands() -> list[tuple[str, int, list[str]]]:
    """Page, line and words of each command in blocks of `sh`."""
    return [(page, block.line, words) for page, block in sh_blocks() for words in simple_commands(block.text)]


def inline_commands() -> list[tuple[str, int, list[str]]]:
    """Page, line and words of each command in the text and the tables, where it is complete."""
    return [
        (page, number, words)
        for page in PAGES
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1)
        for command in re.findall(r"`((?:make|python(?! -m llama_cpp)|cargo|benches/peers/\w+(?:\.py)?) [^`]+)`", line)
        if "…" not in command
        for words in simple_commands(command)
    ]


def check_ferrule(words: list[str]) -> None:
    """Parses a command of ferrule with its own parser, in an empty folder."""
    for word in words:
        # Options check that the files they read exist.
        if re.fullmatch(r"[A-Z]+|[\w.]+\.(json|jsonl|lark|raw)", word):
            Path(word).touch()
        elif word.startswith(("path/to/", "./my-")) and not Path(word).exists():
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).symlink_to(TINY)
    group = click.Context(app, info_name="ferrule")
    assert len(words) > 1, "no command"
    command = app.get_command(group, words[1])
    assert command is not None, f"ferrule has no command {words[1]}"
    command.make_context(words[1], words[2:], parent=group)


def check_make(words: list[str]) -> None:
    """Expands the rules of the targets, without the commands that make would start."""
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in words[1:] if "=" not in word]
    assert targets, "no target"
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"
    done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_pip(words: list[str]) -> None:
    """Parses requirements; extras of ferrule are those of pyproject.toml."""
    assert words[1] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[2:]:
        requirement = Requirement(word)
        if requirement.name == "ferrule":
            assert requirement.extras <= extras.keys(), word


def check_cargo(words: list[str]) -> None:
    """Checks that package, bench and example targets exist."""
    assert words[1] in ("test", "bench", "check", "clippy", "fmt", "doc", "run")
    arguments = words[2:]
    members = {
        tomllib.loads(path.read_text())["package"]["name"]: path.parent for path in (ROOT / "rust").glob("*/Cargo.toml")
    }
    folder: Path | None = None
    for option, value in itertools.pairwise(arguments):
        if option in ("-p", "--package"):
            assert value in members, value
            folder = members[value]
        if option in ("--bench", "--test", "--example"):
            assert folder is not None, "name the package first"
            place = folder / {"--bench": "benches", "--test": "tests", "--example": "examples"}[option]
            assert (place / f"{value}.rs").is_file() or (place / value / "main.rs").is_file(), value


def check_script(words: list[str]) -> None:
    """Starts a Python script up to its argument parser."""
    path = ROOT / words[0]
    assert path.is_file(), f"{words[0]} does not exist"
    if words[0].startswith(NEEDS_TORCH):
        return
    command = [sys.executable, str(ROOT / "tests" / "argument_parser.py"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr or f"{words[0]} does not parse arguments"


def check_python(words: list[str]) -> None:
    """Checks a script, `-m pytest`, or `-m` with a module of this repository."""
    if words[1] != "-m":
        check_script(words[1:])
    elif words[2] == "pytest":
        for word in words[3:]:
            assert not word.startswith("tests") or (ROOT / word.partition("::")[0]).exists(), word
    else:
        modules = [ROOT / "benches" / "peers" / f"{words[2].replace('.', '/')}.py"]
        assert words[2] == "ferrule" or any(path.is_file() for path in modules), words[2]


def check_install_peer(words: list[str]) -> None:
    (peer,) = words[1:]
    assert peer == "PEER" or re.search(rf"^    {re.escape(peer)}\) ", (ROOT / words[0]).read_text(), re.MULTILINE), (
        f"no peer {peer}"
    )


def check_source(words: list[str]) -> None:
    assert words == ["source", ".venv/bin/activate"]


def check_eval(words: list[str]) -> None:
    found = re.fullmatch(r"\$\((.*)\)", words[1])
    assert found is not None
    check_ferrule(shlex.split(found[1]))


def check_nothing(words: list[str]) -> None:
    assert len(words) > 1


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "ferrule": check_ferrule,
    "make": check_make,
    "pip": check_pip,
    "cargo": check_cargo,
    "python": check_python,
    "benches/peers/compare.py": check_script,
    "benches/peers/install": check_install_peer,
    "source": check_source,
    "eval": check_eval,
    "export": check_nothing,
}
"""Check of each program's commands."""


def check(words: list[str]) -> None:
    program = words[0].removeprefix(".venv/bin/")
    assert program in CHECKS, f"no check for commands of {program}"
    assert program in NOT_RUN, f"no reason that {program} does not run"
    CHECKS[program]([program, *words[1:]])


@pytest.mark.parametrize("page", PAGES)
def test_code_fences_have_known_languages(page: str) -> None:
    fences = re.findall(r"^\s*```", (ROOT / page).read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(ROOT / page))
    assert {block.language for block in blocks(ROOT / page)} <= LANGUAGES


@pytest.mark.parametrize(
    ("page", "line", "words"),
    [pytest.param(*each, id=f"{each[0]}:{each[1]}:{each[2][0]}") for each in [*all_commands(), *inline_commands()]],
)
def test_commands_parse(
    page: str, line: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(words)


def test_every_not_run_entry_is_used() -> None:
    used = {words[0].removeprefix(".venv/bin/") for _, _, words in all_commands()}
    assert used == NOT_RUN.keys() == CHECKS.keys()


@pytest.mark.parametrize(
    "command",
    [
        "make wheel",
        "ferrule run --no-such-option",
        "ferrule no-such-command",
        "pip install 'ferrule[no-such-extra]'",
        "cargo test -p no-such-crate",
        "cargo bench -p ferrule-kernels --bench no_such_bench",
        "python benches/no_such_script.py",
        "python benches/serving.py no-such-benchmark",
        "python -m no_such_module",
        "benches/peers/compare.py --no-such-option ferrule:int4",
        "benches/peers/install no-such-peer",
        "scripts/no-such-script",
        "curl localhost:8000",
    ],
)
def test_invalid_commands_are_detected(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, click.UsageError)):
        check(shlex.split(command))


def test_blocks_are_split_into_commands() -> None:
    text = "a b   # comment; not a command\nX=1 c 'd; e' | f > out\ng \\\n    h && i; j\nexport K=1\n"
    assert list(simple_commands(text)) == [
        ["a", "b"], ["c", "d; e"], ["f"], ["g", "h"], ["i"], ["j"], ["export", "K=1"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "block"), [pytest.param(*each, id=f"{each[0]}:{each[1].line}") for each in sh_blocks()]
)
def test_runnable_commands_are_in_console_blocks(page: str, block: Block) -> None:
    """A command that needs nothing but ferrule belongs in a console block, which runs."""
    if page.startswith(("README.md", "docs/")):
        for line in block.text.splitlines():
            if line.startswith("ferrule ") and not line.startswith(UNTIL_INTERRUPTED):
                assert any(word in line.partition(" #")[0] for word in EXTERNAL), f"{page}: {line} can run: let it"


@pytest.mark.parametrize("page", PAGES)
def test_non_executed_blocks_are_well_formed(page: str) -> None:
    for block in blocks(ROOT / page):
        if block.language == "py" and not block.text.startswith("--8<--"):
            compile(block.text, f"{page}:{block.line}", "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)


def test_make_help_lists_readme_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"demo", "test", "lint", "docs", "dist"} <= listed
