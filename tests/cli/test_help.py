"""Help: valid examples, option headings, the welcome text, and shell completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ferrule._cli import main
from ferrule._cli.app import COMMANDS, WELCOME, app
from ferrule._cli.help import EXIT_CODES, Command, Option


def commands() -> dict[str, click.Command]:
    context = click.Context(app)
    found = {name: app.get_command(context, name) for name in app.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def command_lines(text: str) -> list[list[str]]:
    """Returns the ferrule command lines in a shell line, without redirections."""
    # $(...) of one that another command runs, $'...' of a newline, variables in front of a command.
    plain = re.sub(r"eval \"\$\((.*)\)\"|\$(?=')|\b[A-Z_]+=\w+ ", r"\1", text)
    lines = [shlex.split(re.split(r"[<>|]", part)[0]) for part in plain.split(";")]
    assert all(words[0] == "ferrule" for words in lines), text
    return [words[1:] for words in lines]


EXAMPLES = [typed for command in commands().values() if isinstance(command, Command) for _, typed in command.examples]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: ferrule {name}" in text
    assert "\nExamples:\n  # " in text


@pytest.mark.parametrize("typed", EXAMPLES)
def test_example_command_lines_parse(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("my-model", "my-model-int4"):
        (tmp_path / file).mkdir()
    for file in ("wiki.test.raw", "text.txt", "in.jsonl"):
        (tmp_path / file).touch()
    for line in command_lines(typed):
        assert line[0] in COMMANDS, typed
        commands()[line[0]].make_context(line[0], line[1:])  # which raises where something is not known


def test_options_are_grouped_by_heading(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    text = capsys.readouterr().out
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:4] == ["Examples:", "Options:", "Sampling:", "Stopping:"]
    assert headings[-2:] == ["Loading:", "Speculative decoding:"]
    for command in commands().values():
        for parameter in command.params:
            assert not isinstance(parameter, Option) or (parameter.topic and parameter.help), parameter.name
            assert isinstance(parameter, click.Argument) or parameter.help, parameter.name  # type: ignore[attr-defined]


def test_serve_options_all_have_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    commands()["serve"].make_context("serve", [])  # who asks first is not who decides what all get
    assert main(["serve", "--help"]) == 0
    assert "\nOptions:\n  -h, --help  Show this message and exit.\n\nModels:\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["search"]])
def test_closed_stdout_exits_silently(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # `| head` has read enough before the first word
    process = subprocess.run(
        [sys.executable, "-m", "ferrule", *arguments], stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (1, b"")


def test_welcome_text_lists_valid_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == f"{WELCOME}\n"
    lines = [
        line
        for text in WELCOME.splitlines()
        if text.startswith("  ferrule")
        for line in command_lines(text.split("   ")[0])
    ]
    assert len(lines) == 6
    for line in lines:
        commands()[line[0]].make_context(line[0], line[1:])
    assert max(map(len, WELCOME.splitlines())) <= 80


def test_top_level_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert " ".join(EXIT_CODES.split()) in " ".join(text.split())
    assert main(["--version"]) == 0


def test_examples_are_not_wrapped_on_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["quantize", "--help"]) == 0
    text = capsys.readouterr().out
    assert "ferrule quantize org/repo --calibrate text.txt -o my-model-int4" in text  # whole, to be copied


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert f"_FERRULE_COMPLETE={shell}_complete" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ferrule ru", ["run", "run-batch"]),
        ("ferrule run --temp", ["--temperature"]),
        ("ferrule chat ti", ["tiny"]),
        ("ferrule --ver", ["--version"]),
        ("ferrule bench --shape qwen3-0", ["qwen3-0.6b"]),
    ],
)
def test_words_are_completed(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FERRULE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        main([])
    assert [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()] == expected
