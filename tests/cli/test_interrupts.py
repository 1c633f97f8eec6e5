"""Ctrl-C during a long prefill, on the real engine.

The command is specified to react within 0.2 s. Its processor time is asserted with fivefold slack.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from event_loop import SLACK
from processor_time import processor_seconds, processor_seconds_of_children, wait_until_computing

pytestmark = pytest.mark.native

PROGRAM = """
import sys
from ferrule import LLM
from ferrule._cli import main

def announced_stream(self, *arguments, stream=LLM.stream, **more):
    print("prefill", file=sys.stderr, flush=True)
    return stream(self, *arguments, **more)

LLM.stream = announced_stream
sys.exit(main())
"""
PROMPT = "word " * 10_000
"""Prompt of about ten thousand tokens."""


@pytest.mark.parametrize("options", [(), ("--json",), ("--speculative-method", "ngram")])
def test_ctrl_c_during_prefill_ends_run(options: tuple[str, ...], long_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "run", str(long_model), "-", "-n", "4", "--threads", "2", *options]
    prompt = tmp_path / "prompt"
    prompt.write_text(PROMPT)
    with (
        prompt.open() as stdin,
        subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        assert process.stderr.readline() == "prefill\n"
        before = processor_seconds_of_children()
        sent = wait_until_computing(process.pid)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output, errors.strip()) == (130, "", "")
        assert processor_seconds_of_children() - before - sent < 0.2 * SLACK


def test_ctrl_c_during_prefill_returns_to_chat_prompt(long_model: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "chat", str(long_model), "-n", "24", "--threads", "2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(f"{PROMPT}\nWhat is the capital of France?\n")
        process.stdin.flush()
        assert process.stderr.readline() == "prefill\n"
        sent = wait_until_computing(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "[the answer has no text; the message was removed]\n"
        assert process.stderr.readline() == "prefill\n"
        assert processor_seconds(process.pid) - sent < 0.2 * SLACK
        output, errors = process.communicate(timeout=60)
        assert "Paris" in output
        assert (process.returncode, errors) == (0, "")
