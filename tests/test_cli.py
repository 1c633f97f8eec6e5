"""The command line on a fake engine: exit codes, output on stdout and stderr, closed streams."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fakes
from cli.terminal import Terminal
from ferrule._cli import main
from ferrule._cli.run import command as run_command
from ferrule._cli.sampling import OTHER
from ferrule._params.declaration import Integer, Number, parameters
from ferrule._params.sampling import SamplingParams

TESTS = Path(__file__).parent
PROGRAM = """
import sys, fakes
fakes.install()
fakes.Engine.step_seconds = 0.005
from ferrule._cli import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def engine(fake_engine: type[fakes.Engine]) -> type[fakes.Engine]:
    return fake_engine


def command(*arguments: str) -> list[str]:
    """Returns the command of a `ferrule` process that is slow enough to be interrupted."""
    return [sys.executable, "-c", PROGRAM, *arguments]


def test_run_writes_text_to_stdout_and_statistics_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "The capital", "-n", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "4 tokens" in captured.err
    assert main(["run", "tiny", "The capital", "-n", "4", "--quiet"]) == 0
    assert capsys.readouterr() == (captured.out, "")


def test_run_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "The capital", "-n", "4", "--seed", "9", "--temperature", "0.8", "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert (record["model"], record["seed"], len(record["token_ids"])) == ("tiny", 9, 4)
    assert record["metrics"]["output_tokens"] == 4
    assert captured.err == ""


def test_run_is_greedy_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    texts: set[str] = set()
    for _ in range(2):
        main(["run", "x", "-n", "8", "-q"])
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_run_stop_string(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "x", "-n", "8", "-q"])
    text = capsys.readouterr().out
    main(["run", "x", "-n", "8", "-q", "--stop", text[5:7]])
    assert capsys.readouterr().out == text[: text.index(text[5:7])] + "\n"


def test_control_characters_in_prompt_are_escaped() -> None:
    with Terminal(command("run", "\x1b]0;title\x07x", "-n", "1")) as terminal:
        assert terminal.end() == 0
    assert "\N{SYMBOL FOR ESCAPE}]0;title\N{SYMBOL FOR BELL}x" in terminal.written


@pytest.mark.parametrize("words", [["-"], []])
def test_prompt_from_stdin(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.run(
        command("run", *words, "-n", "2", "--json"),
        input="Grüße\n",
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=True,
    )
    piped = json.loads(process.stdout)
    assert main(["run", "Grüße", "-n", "2", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert piped["text"] == given["text"]
    assert piped["metrics"]["prompt_tokens"] == given["metrics"]["prompt_tokens"] > 1


def test_missing_prompt_on_terminal_is_usage_error() -> None:
    with Terminal(command("run")) as terminal:
        assert terminal.end() == 2
    assert "PROMPT is missing" in terminal.written


USAGE: list[tuple[list[str], str]] = [
    (["run"], "PROMPT is missing; give it in quotes or pipe it in, or start a chat: ferrule run MODEL"),
    (["explain"], "PROMPT is missing; give it in quotes or pipe it in"),
    (["run", "a", "b", "c"], "expected [MODEL] PROMPT, got 3 arguments; put the prompt in quotes"),
    (["run", "--threads", "0", "x"], "threads must be an integer from 1 to 1024, got 0"),
    (["run", "/no/such/model", "x"], "no directory /no/such/model"),
    (["info", str(TESTS / "test_cli.py")], "or a GGUF file, got a file"),
    (["chat", "/no/such/model"], "no directory /no/such/model"),
    (["run", "x", "--tokenizer", "/no/such/model"], "no directory /no/such/model"),
    (["run", "x", "--quantization", "int1"], "'int1' is not one of"),
    (["run", "x", "--temperature", "hot"], "temperature must be a number from 0 to 100, got 'hot'"),
    (["run", "x", "--temperature", "-1"], "temperature must be a number from 0 to 100, got -1.0"),
    (["run", "x", "--top-p", "nan"], "top_p must be a number > 0 and <= 1, got nan"),
    (["run", "x", "-n", "0"], "max_tokens must be an integer from 1 to 2147483647, got 0"),
    (["run", "tiny", "x", "--revision", "main"], "only models of the hub"),
    (["run", "x", "--prefix-cache-dir", str(TESTS / "test_cli.py")], "is a file"),
    (["bench", "--prefix-cache-dir", "x"], "No such option"),
    (["bench", "--gen", "1"], "1 is not in the range"),
    (["nonsense"], "No such command 'nonsense'. `ferrule --help` lists them."),
    (["chta"], "Did you mean 'chat'?"),
    (["Once upon a time"], "ferrule run PROMPT"),
    (["run", "x", "--nonsense"], "No such option"),
    (["run", "x", "--temprature", "1"], "--temperature"),
    (["run", "x", "--allowed-token-ids", "1,b"], "must be token ids such as 11,42, got '1,b'"),
    (["run", "x", "--logit-bias", "1:2"], "must be a token id and a number, such as 42=-100, got '1:2'"),
    (["chat", "--url", "ftp://x"], "url must be an HTTP URL such as http://127.0.0.1:8000/v1, got 'ftp://x'"),
    (["chat", "--url", "http://127.0.0.1:1", "--threads", "1"], "--threads has no effect with --url"),
    (["pull", "tiny"], "ships with ferrule"),
    (["pull", "/no/such"], "'/no/such' not found: no directory /no/such"),
    (["run-batch", "one"], "expected [MODEL] INPUT OUTPUT, got 1 arguments"),
    (["run-batch", "/no/such/in", "/tmp/out"], "error: input_file must be a readable file"),
    (["completion", "tcsh"], "'tcsh' is not one of"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_usage_error_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_unreadable_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # root may read anything, so permissions cannot be tested by themselves
    assert main(["info", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: Permission denied\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json: not valid JSON"),
        (None, "config.json is missing"),
        ("{}", "model_type must be a string, but it is missing"),
    ],
)
def test_runtime_error_is_one_line_and_exit_code_1(
    config: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["info", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_closed_stdout_exits_silently() -> None:
    process = subprocess.Popen(
        command("run", "x", "-n", "2000", "--ignore-eos"), cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command("run", "x", "-n", "2")],
        cwd=TESTS,
        capture_output=True,
        check=False,
    )
    assert (process.returncode, b"Traceback" in process.stderr) == (0, False), process.stderr


def test_full_disk_error_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            command("run", "x", "-n", "2"), cwd=TESTS, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert process.returncode == 1
    assert process.stderr.startswith("error: ")
    assert "No space left" in process.stderr
    assert process.stderr.count("\n") == 1


def test_ctrl_c_ends_run_with_130() -> None:
    process = subprocess.Popen(
        command("run", "x", "-n", "2000", "--ignore-eos"), cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_python_dash_m() -> None:
    process = subprocess.run([sys.executable, "-m", "ferrule", "--version"], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("ferrule")


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("info loads nothing")

    monkeypatch.setattr(fakes.Engine, "step", refuse)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny: llama, 5 million parameters\n")
    assert "8 heads of 32, 4 key-value heads" in text
    assert text.endswith("The model fits, with sequences of 2,048 tokens.\n")
    assert main(["info", "tiny", "--threads", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["threads"] == 3
    assert main(["info", "--shape", "llama-8b", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["model"], info["layers"], info["checkpoint_bytes"]) == ("llama-8b", 32, None)
    assert main(["info", "tiny", "--shape", "llama-8b"]) == 2
    assert "give MODEL or --shape, not both" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "x", "-n", "1"], ["chat"], ["explain", "x", "-n", "1"]])
def test_prefix_cache_directory_is_passed_to_engine(
    arguments: list[str], engine: type[fakes.Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories: list[str] = []
    info = fakes.Engine.info

    def note(self: fakes.Engine) -> str:
        directories.append(self.options["prefix_cache_dir"])
        return info(self)

    monkeypatch.setattr(engine, "info", note)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main([*arguments, "--prefix-cache-dir", str(tmp_path / "pages")]) == 0
    assert directories == [str(tmp_path / "pages")]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "The capital of", "-n", "2", "--top", "4"]) == 0
    text = capsys.readouterr().out
    assert "459" in text
    assert "<- chosen" in text
    assert "dropped by top_k" in text
    assert "Greedy" in text
    assert main(["explain", "The capital of", "-n", "2", "--temperature", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [token["text"] for token in record["tokens"]] == ["The", " capital", " of"]
    assert len(record["steps"]) == 2
    assert record["steps"][0]["draw"] == 0.5


def test_explain_shows_tokens_left_by_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "The capital of", "-n", "1", "--temperature", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"stage +tokens left +entropy +probability of", out)
    assert re.search(r"top_k +3 +0\.500 nats", out)
    assert main(["explain", "The capital of", "-n", "1", "--temperature", "1", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["steps"][0]
    assert step["stages"] == [{"name": "top_k", "tokens_left": 3, "entropy": 0.5}]
    assert all(len(candidate["stage_probabilities"]) == 1 for candidate in step["candidates"])


def test_every_sampling_option_is_passed_to_engine(
    fake_engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[dict[str, Any]] = []
    add = fakes.Engine.add_request

    def watch(self: fakes.Engine, ids: list[int], params: str, *rest: Any) -> int:
        passed.append(json.loads(params))
        return add(self, ids, params, *rest)

    monkeypatch.setattr(fakes.Engine, "add_request", watch)
    declared = parameters(SamplingParams)
    given = {name: 1 for name in OTHER if isinstance(declared[name].bounds, Number | Integer)}
    options = [part for name in given for part in (f"--{name.replace('_', '-')}", "1")]
    options += ["--bad-word", "Paris", "--bad-word-ids", "5,6", "--bad-word-ids", "7", "--allowed-token-ids", "3,4"]
    options += ["--logit-bias", "3=-1.5", "--logit-bias", "4=2", "--dry-sequence-breaker", "?"]
    options += ["--min-tokens", "1", "--stop-token-id", "9"]
    assert main(["run", "x", "-n", "1", *options]) == 0
    assert given.items() <= passed[0].items()
    assert passed[0]["bad_words"]
    assert (passed[0]["allowed_token_ids"], passed[0]["min_tokens"]) == ([3, 4], 1)
    assert dict(passed[0]["logit_bias"]) == {3: -1.5, 4: 2.0} or passed[0]["logit_bias"] == {"3": -1.5, "4": 2.0}
    assert [5, 6] in passed[0]["bad_words"] + passed[0].get("bad_words_ids", [])
    assert 9 in passed[0]["stop_token_ids"]


def test_every_sampling_parameter_has_an_option() -> None:
    names = {parameter.name for parameter in run_command.params}
    # Functions and several completions have no option; structured outputs have separate options.
    left = {"n", "best_of", "logits_processors", "structured_outputs", "detokenize", "output_kind"}
    assert set(SamplingParams.__dataclass_fields__) - names == left


def test_run_json_has_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "The capital of", "-n", "2", "--logprobs", "1", "--prompt-logprobs", "0", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (len(record["logprobs"]), len(record["prompt_logprobs"])) == (2, 3)


def test_explain_shows_every_token_of_a_long_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "capital " * 60, "-n", "1"]) == 0
    assert capsys.readouterr().out.count("\N{OPEN BOX}capital") >= 59


def test_explain_fits_narrow_terminal_without_truncation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in ("40", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["explain", "The capital of", "-n", "1", "--temperature", "1"]) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert max(len(line) for line in out.splitlines()) <= int(columns)


def test_explain_does_not_interpret_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "[red]x[/red]", "-n", "1"]) == 0
    assert "[red]x[/red]" in capsys.readouterr().out


def test_chat_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((TESTS / "golden" / "logits" / "llama" / "config.json").read_text())
    assert main(["chat", str(tmp_path)]) == 1
    assert "no default chat template" in capsys.readouterr().err
