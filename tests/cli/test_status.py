"""The status line: shown after a delay on a terminal, erased before other output, never written elsewhere."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.terminal import SECONDS, TESTS, Screen, Terminal
from cli.test_run_batch import chat_request, written
from ferrule import LLM
from ferrule._cli import model, status
from ferrule._cli.chat.answers import is_visible
from ferrule._cli.model import ProgressBar
from ferrule._cli.status import DELAY, SILENCE, Silence, StatusLine

PROGRAM = """
import sys
from ferrule._cli import main, status

class TimerThatHasRunOut:
    def __init__(self, delay, show):
        self.start, self.cancel = show, lambda: None

status.Timer = TimerThatHasRunOut
sys.exit(main())
"""
COMMAND = [sys.executable, "-c", PROGRAM]
PROMPT = "word " * 10_000


class TerminalOutput(io.StringIO):
    def isatty(self) -> bool:
        return True


class ManualTimer:
    """A timer that runs out when the test calls `run_out`."""

    last: ManualTimer | None = None

    def __init__(self, delay: float, run_out: Callable[[], None]) -> None:
        assert 0 <= delay <= DELAY
        self.delay = delay
        self.run_out = run_out
        self.started = self.cancelled = False
        ManualTimer.last = self

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True


def shown(written: str, width: int = 80) -> str:
    screen = Screen(24, width)
    screen.write(written)
    return screen.text()


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> TerminalOutput:
    stream = TerminalOutput()
    monkeypatch.setattr(status, "sys", SimpleNamespace(stderr=stream))  # pytest replaces sys.stderr before the test
    monkeypatch.setattr(status, "Timer", ManualTimer)
    monkeypatch.setattr(ManualTimer, "last", None)
    SILENCE.end()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def timer() -> ManualTimer:
    assert ManualTimer.last is not None
    return ManualTimer.last


def test_line_appears_after_the_delay_and_is_erased(stderr: TerminalOutput) -> None:
    with StatusLine("first") as line:
        assert timer().started
        line.update("second")
        assert not stderr.getvalue()
        timer().run_out()
        assert shown(stderr.getvalue()) == "second"
        line.read_tokens(1024, 87_700)
        assert shown(stderr.getvalue()) == "reading the prompt: 1,024 of 87,700 tok"
        line.clear()
        assert not shown(stderr.getvalue())
        stderr.write("answer")
        line.update("late")
        timer().run_out()
    assert shown(stderr.getvalue()) == "answer"
    assert timer().cancelled


def test_nothing_is_written_when_the_work_is_fast(stderr: TerminalOutput) -> None:
    with StatusLine("fast"):
        pass
    timer().run_out()  # at the moment at which the work ends
    assert not stderr.getvalue()


def test_delay_counts_from_the_last_visible_output(stderr: TerminalOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(status, "SILENCE", Silence())

    def delay_after(seconds: float) -> float:
        nonlocal now
        now += seconds
        with StatusLine("next step"):
            return timer().delay

    assert [delay_after(DELAY / 4) for _ in range(5)] == [DELAY * part / 4 for part in (3, 2, 1, 0, 0)]
    assert not stderr.getvalue(), "no line was shown"
    with StatusLine("shown"):
        timer().run_out()
    assert delay_after(0) == 0, "the next line takes its place"
    with StatusLine("not shown") as line:
        now += DELAY / 2
        line.clear()
        stderr.write("answer")
    assert delay_after(0) == DELAY


def test_progress_bar_takes_the_place_of_the_line(stderr: TerminalOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PROGRESS_DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", stderr)
    with StatusLine("reading the configuration") as line, ProgressBar("loading weights", line, "bytes") as bar:
        timer().run_out()
        bar.update(0, 8)
        bar.update(8, 8)
        assert shown(stderr.getvalue()) == "loading weights", "nothing that a bar could show"
        bar.update(4, 8)
        assert "loading weights ━" in shown(stderr.getvalue())
    assert not shown(stderr.getvalue()).strip()


def test_status_line_stays_while_the_answer_is_not_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def visible() -> list[bool]:
        return [is_visible("content", ""), is_visible("", "reasoning"), is_visible("", "")]

    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as pipe, (tmp_path / "answer").open("w") as file:
        for stream, expected in ((TerminalOutput(), [True, True, False]), (pipe, [True, False, False])):
            monkeypatch.setattr(sys, "stdout", stream)
            assert visible() == expected
        monkeypatch.setattr(sys, "stdout", file)
        assert visible() == [False] * 3


def test_error_erases_the_line(stderr: TerminalOutput) -> None:
    def interrupted() -> None:
        with StatusLine("work"):
            timer().run_out()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not shown(stderr.getvalue())


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_terminal_without_cursor_movement_gets_no_line(
    name: str, value: str, stderr: TerminalOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with StatusLine("work"):
        assert ManualTimer.last is None
    assert not stderr.getvalue()


def test_long_text_stays_on_one_line(stderr: TerminalOutput) -> None:
    with StatusLine("loading \x1b]0;title\x07 " + "模型" * 40):
        timer().run_out()
        assert stderr.getvalue().count("\x1b") == 1, "control characters of a name are not written"
        assert len(shown(stderr.getvalue(), 39)) < 39


@pytest.mark.native
def test_progress_of_a_long_prompt(long_model: Path) -> None:
    reports: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        reports.append((done, total))

    with LLM(long_model, max_num_batched_tokens=64, max_model_len=1024) as llm:
        prompt = "word " * 200
        total = len(llm.tokenize(prompt))
        deltas = llm.stream(prompt, progress=report)
        assert next(deltas).token_ids
        deltas.close()
        before_first_token = list(reports)
        assert [each for _, each in reports] == [total] * len(reports)
        done = [each for each, _ in reports]
        assert done == sorted(set(done))
        assert 0 < done[0] <= done[-1] < total
        assert [step.text for step in llm.explain("Once", progress=report)]
        assert reports == before_first_token, "a prompt of one chunk has no progress"


@pytest.mark.native
@pytest.mark.parametrize("arguments", [("run", "Once upon a time"), ("explain", "Once upon a time", "--top", "2")])
def test_answer_on_a_terminal_has_no_trace_of_the_line(arguments: tuple[str, ...]) -> None:
    command = [*COMMAND, *arguments, "-n", "4", "--temperature", "0"]
    with Terminal([*command, *(["-q"] if arguments[0] == "run" else [])]) as terminal:
        assert terminal.end() == 0
        written = terminal.written
    piped = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True, timeout=180)
    assert "\x1b" not in piped.stdout + piped.stderr
    assert "reading the prompt" not in piped.stdout + piped.stderr
    assert all(text in written for text in (f"starting ferrule {arguments[0]}", "the tokenizer", "reading the prompt"))
    answer = shown(written).strip()
    if arguments[0] == "run":
        assert answer == f"{arguments[1]}{piped.stdout}".strip()
    else:
        assert answer.startswith("Prompt  Once upon a time")
        assert "reading the prompt" not in answer


@pytest.mark.native
def test_batch_shows_what_it_waits_for(tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", chat_request(0)), tmp_path / "out.jsonl"
    command = [*COMMAND, "run-batch", str(source), str(target)]
    with Terminal(command) as terminal:
        assert terminal.end() == 0
        output = terminal.written
    for text in (
        "starting ferrule run-batch",
        f"reading {source}"[:79],
        "starting the engine",
        "loading the tokenizer",
        "waiting for the first response",
    ):
        assert text in output
    assert re.fullmatch(r"1 line answered, 0 errors, \S+ requests/s", shown(output).strip())
    for quiet in (False, True):
        target.unlink()
        piped = subprocess.run(
            [*command, *(["-q"] if quiet else [])], cwd=TESTS, capture_output=True, check=True, timeout=180
        )
        assert (piped.stdout, piped.stderr.count(b"\n"), b"\x1b" in piped.stderr) == (b"", 0 if quiet else 1, False)


@pytest.mark.native
def test_server_shows_what_it_waits_for() -> None:
    with Terminal([*COMMAND, "serve", "--port", "0"]) as terminal:
        output = terminal.read_until("Ctrl-C stops the server.")
        terminal.interrupt()
        assert terminal.end() == 0
    assert "starting ferrule serve" in output
    assert "starting the server" in output
    loading, _, banner = shown(output).strip().partition("\n")
    assert re.fullmatch(r"loading tiny for http://127.0.0.1:\d+", loading)
    assert banner.strip().startswith("ferrule is ready.")


@pytest.mark.native
def test_json_log_on_a_terminal_has_only_json() -> None:
    with Terminal([*COMMAND, "serve", "--port", "0", "--log-format=json"]) as terminal:
        listening = json.loads(terminal.read_until("\n"))
        deadline = time.monotonic() + SECONDS
        while not is_ready(listening["url"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        terminal.interrupt()
        assert terminal.end() == 0
    events = [json.loads(line)["event"] for line in terminal.written.splitlines()]
    assert events[0] == "listening"


def is_ready(url: str) -> bool:
    """Whether the server has loaded its models."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # refused, or not answered in time
        return False


@pytest.mark.native
def test_ctrl_c_during_prefill_erases_the_line(long_model: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text(PROMPT)
    command = ["sh", "-c", 'exec "$@" < "$0"', str(prompt), *COMMAND, "run", str(long_model), "-", "--threads", "2"]
    with Terminal(command) as terminal:
        terminal.read_until("reading the prompt: ")
        terminal.interrupt()
        assert terminal.end() == 130
        assert not shown(terminal.written).strip()
