"""`ferrule chat`: commands, files, and behavior on a terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import fakes
from cli.terminal import TESTS, Terminal
from ferrule._cli import main
from ferrule._cli.chat.commands import COMMANDS, complete
from ferrule._cli.chat.conversation import NOT_IN_CHATS, PARAMETERS, Conversation, with_parameters
from ferrule._cli.chat.lines import MAX_MESSAGES, Lines
from ferrule._params.sampling import SamplingParams

PROGRAM = """
import sys, fakes
fakes.install()
fakes.Engine.step_seconds = {}
from ferrule._cli import main
sys.exit(main())
"""
REAL = [sys.executable, "-m", "ferrule", "chat"]
"""Runs `ferrule chat` with the embedded model."""
SLOW = [sys.executable, "-c", PROGRAM.format(0.005), "chat"]
"""Runs `ferrule chat` on the fake engine with 5 ms per token."""
ENDLESS = [sys.executable, "-c", PROGRAM.format(0.1), "chat"]
"""Runs `ferrule chat` on the fake engine with 100 ms per token: a whole answer takes longer than a test waits."""

Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(fake_engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Sends lines to a chat on the fake engine; returns the exit code, stdout and stderr."""

    def chat(*typed: str, options: tuple[str, ...] = ("-n", "4")) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
        code = main(["chat", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return chat


def test_each_message_gets_a_line_of_output(chat: Chat) -> None:
    code, out, err = chat("Hi", "", "And again")
    assert (code, out.count("\n"), err) == (0, 2, "")


def test_multiline_input_is_one_message(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    chat('"""one', "two", '"""', f"/save {path}")
    assert json.loads(path.read_text())["messages"][0]["content"] == "one\ntwo"
    chat("one\\", "two", f"/save {path}")
    assert json.loads(path.read_text())["messages"][0]["content"] == "one\ntwo"
    chat('"""all in one line"""', f"/save {path}")
    assert json.loads(path.read_text())["messages"][0]["content"] == "all in one line"
    chat("C:\\\\", f"/save {path}")  # a backslash that stands for itself
    assert json.loads(path.read_text())["messages"][0]["content"] == "C:\\\\"


def test_unterminated_block_is_a_message(chat: Chat) -> None:
    code, out, _ = chat('"""one', "two")
    assert (code, out.count("\n")) == (0, 1)


def test_system_and_params_commands_change_request(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    code, out, err = chat(
        "/system Be kind.", "/params temperature 0.5", "/params top_p=0.9", "/params stop END", "Hi", f"/save {path}"
    )
    body = json.loads(path.read_text())
    assert code == 0
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant"]
    assert body["messages"][2]["content"] == out.removesuffix("\n")
    given = {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "stop": ["END"], "max_tokens": 4}
    assert {name: body[name] for name in given} == given
    assert "temperature = 0.5" in err
    _, _, err = chat(
        "/system Be kind.", "/system none", "/params top_k 5", "/params default", "/params", "/params top_k"
    )
    assert "no system prompt" in err
    assert "max_tokens = 4\ntemperature = 0.0 (default)\n" in err
    assert "\n/params NAME VALUE" in err
    assert "top_k = the default" in err


def test_undo_and_retry(chat: Chat) -> None:
    _, out, err = chat("Hi", "/retry", "/undo", "/undo", "/retry", "/stats")
    answers = out.splitlines()
    assert len(answers) == 2
    assert answers[0] == answers[1]  # the same conversation, and greedy
    assert "removed: Hi\nno messages\nno messages\n" in err
    assert "tiny: 2 answers, 0 messages" in err


def test_stats_command_and_verbose_statistics(chat: Chat) -> None:
    _, _, err = chat("Hi", "Hi", "/stats", options=("-n", "4", "--ignore-eos", "-v"))
    assert err.count("4 tokens,") == 3  # twice as they came, and the last once more
    assert "answers 8 tokens" in err
    assert "of 2,048" in err


def test_saved_conversation_is_continued(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    _, first, _ = chat("/params seed 4", "Hi", f"/save {path}", "And?", options=("-n", "4", "--temperature", "1"))
    _, out, err = chat(f"/load {path}", "And?", options=())
    assert out == first.splitlines()[1] + "\n"
    assert f"{path}: 2 messages" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON: Expecting property name"),
        ("[" * 100_000, "is not valid JSON: maximum recursion depth exceeded"),
        ("3", ": messages must be a list of messages, got 3"),
        ("{}", "messages must be a list of messages, got None"),
        (
            '[{"role": "robot", "content": ""}]',
            "messages[0].role must be one of system, user, assistant, tool, got 'robot'",
        ),
        ('[{"role": "user", "content": 3}]', "messages[0].content must be a string, got 3"),
        ('["Hi"]', "messages[0] must be an object, got 'Hi'"),
        (
            '{"messages": [], "temprature": 1}',
            "parameter must be the name of a sampling parameter (did you mean temperature?), got 'temprature'",
        ),
        ('{"messages": [], "temperature": -1}', "temperature must be a number from 0 to 100, got -1"),
        (
            '{"messages": [], "structured_outputs": {"jsn": 1}}',
            "structured_outputs must be an object with the fields json, regex, choice, grammar, json_object, "
            "structural_tag, disable_any_whitespace, whitespace_pattern (no jsn), got {'jsn': 1}",
        ),
    ],
)
def test_invalid_conversation_file_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(content)
    conversation = Conversation(SamplingParams(), "before")
    with pytest.raises(click.UsageError) as raised:
        conversation.load(path)
    assert raised.value.message.startswith(str(path))
    assert message in raised.value.message
    assert (conversation.system, conversation.history) == ("before", [])


def test_missing_or_unwritable_file_is_reported(tmp_path: Path) -> None:
    conversation = Conversation(SamplingParams())
    with pytest.raises(click.UsageError, match="No such file"):
        conversation.load(tmp_path / "missing.json")
    with pytest.raises(click.UsageError, match=r"such.json cannot be written: No such file or directory$"):
        conversation.save(tmp_path / "no" / "such.json", "tiny")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/statz", "unknown command /statz; did you mean /stats?"),
        ("/xyzzy", "unknown command /xyzzy; /help lists the commands"),
        ("/params temprature 1", "did you mean temperature?"),
        ("/params temperature hot", "temperature must be a number from 0 to 100"),
        ("/params n 2", "parameter must be the name of a sampling parameter, got 'n'"),
        ("/save", "a file name is required: /save FILE.json"),
        ("/load /no/such/file", "/no/such/file cannot be read: No such file or directory"),
    ],
)
def test_command_error_is_one_line_and_chat_continues(chat: Chat, typed: str, message: str) -> None:
    code, out, err = chat(typed, "Hi")
    assert code == 1  # for scripts; who types sees it
    assert out.count("\n") == 1
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err


def test_help_lists_every_command(chat: Chat) -> None:
    _, _, err = chat("/help")
    assert all(f"/{name}" in err for name in COMMANDS)


def test_exit_ends_chat(chat: Chat) -> None:
    assert chat("/exit", "Hi")[1] == ""


def test_every_sampling_parameter_can_be_set() -> None:
    assert set(PARAMETERS) == set(SamplingParams.__dataclass_fields__) - NOT_IN_CHATS
    params = with_parameters(SamplingParams(), {"logit_bias": {"7": 1}, "structured_outputs": {"choice": ["a", "b"]}})
    assert params.logit_bias == {7: 1.0}
    assert params.structured_outputs is not None
    assert with_parameters(params, {"logit_bias": None, "structured_outputs": None}) == SamplingParams()


def test_commands_parameters_and_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "saved.json").touch()
    (tmp_path / "sub").mkdir()
    assert complete("/s") == ["/system ", "/set ", "/save ", "/stats "]
    assert complete("/params tem") == ["temperature "]
    assert complete(f"/load {tmp_path}/s") == [f"{tmp_path}/saved.json", f"{tmp_path}/sub/"]
    assert complete("Hi /s") == complete("/load /no/such/") == []


def test_conversation_over_context_length_is_reported(chat: Chat) -> None:
    code, out, err = chat("word " * 3000, "Hi")
    assert (code, out.count("\n")) == (1, 1)
    assert "/clear starts a new conversation" in err


def history_of(directory: Path) -> list[str]:
    return [json.loads(line) for line in (directory / "ferrule" / "chat_history.jsonl").read_text().splitlines()]


def test_ctrl_c_stops_answer_and_ctrl_d_exits() -> None:
    with Terminal([*ENDLESS, "--ignore-eos"]) as terminal:
        terminal.read_until("> ")
        terminal.send("Tell me\n")
        terminal.read_until("Tell me\r\n")
        terminal.read_until("...")
        terminal.read_until("\x1b[J")  # and the answer in its place
        terminal.interrupt()
        terminal.read_until("> ")
        terminal.interrupt_until("Ctrl-D exits")
        terminal.read_until("> ")
        terminal.send_until("/stats\n", "2 messages")  # what was said until Ctrl-C stays said
        terminal.read_until("> ")
        terminal.send("\x04")
        assert terminal.end() == 0


def test_history_is_restored(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    typed = ['"""one\ntwo"""', "one\\\ntwo", "\x1b[200~pasted\ntext\x1b[201~", "last"]
    with Terminal([*SLOW, "-n", "1"], environment) as terminal:
        for text in typed:
            terminal.read_until("> ")
            terminal.send(f"{text}\n")
        terminal.read_until("> ")
        terminal.send("/stats\n")
        terminal.read_until("8 messages")
        terminal.read_until("> ")
        terminal.send("\x04")
        assert terminal.end() == 0
    assert history_of(tmp_path) == ["one\ntwo", "one\ntwo", "pasted\ntext", "last", "/stats"]
    assert (tmp_path / "ferrule" / "chat_history.jsonl").stat().st_mode & 0o777 == 0o600
    with Terminal([*SLOW, "-n", "1"], environment) as terminal:
        terminal.read_until("> ")
        terminal.send("\x1b[A\x1b[A\n")
        terminal.read_until("last\r\n")
        terminal.read_until("> ")
        terminal.send("/exit\n")
        assert terminal.end() == 0


def test_no_history_option_writes_no_file(tmp_path: Path) -> None:
    with Terminal([*SLOW, "--no-history"], {"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.read_until("> ")
        terminal.send("/stats\n/exit\n")
        assert terminal.end() == 0
    assert not list(tmp_path.iterdir())


def test_damaged_history_is_tolerated_and_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.jsonl"
    lines = [json.dumps(f"message {number}") for number in range(2 * MAX_MESSAGES)]
    path.write_bytes(b"\n".join([*(line.encode() for line in lines), b"{", b"3", b"\xff", b'"torn']))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    reader = Lines(None, complete)
    reader._history = path
    assert reader._past() == [f"message {number}" for number in range(MAX_MESSAGES + 3, 2 * MAX_MESSAGES)]
    assert len(path.read_text(errors="replace").splitlines()) == MAX_MESSAGES  # and the file was cut
    reader._history = tmp_path
    assert reader._past() == []


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_and_dumb_terminal_give_plain_text(environment: dict[str, str]) -> None:
    with Terminal([*SLOW, "-n", "3"], environment) as terminal:
        terminal.read_until("> ")
        terminal.send("Hi\n/exit\n")
        assert terminal.end() == 0
        assert "\x1b[?2026h" not in terminal.written
        assert "\x1b[2m" not in terminal.written


@pytest.mark.native
@pytest.mark.parametrize("size", [(24, 80), (24, 40), (5, 20)])
def test_embedded_model_answers_on_terminal(size: tuple[int, int]) -> None:
    with Terminal(REAL, size=size) as terminal:
        terminal.read_until("> ")
        terminal.send("What is the capital of France?\n")
        terminal.read_until("Paris")
        terminal.read_until("> ")
        terminal.send("\x04")
        assert terminal.end() == 0


def test_closed_stdout_ends_chat_silently() -> None:
    process = subprocess.Popen(
        [*SLOW, "--ignore-eos"], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()
    assert process.wait(60) == 1
