"""Closed streams: a command ends when its stdout is closed, and continues when its stderr is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PROGRAM = """
import sys, fakes
fakes.install()
fakes.Engine.max_num_seqs = 4
from ferrule._cli import main, run_batch
run_batch.INTERVALS = (0, 0)  # it says after each answer how far it is
sys.exit(main())
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *arguments]


@contextmanager
def closed_pipe() -> Generator[int]:
    """Returns a pipe whose reading end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "x", "-n", "3"),
        ("run", "x", "-n", "3", "--json"),
        ("chat", "-n", "3"),
        ("explain", "x", "-n", "2"),
        ("info",),
        ("list", "--json"),
        ("completion", "bash"),
        (),
    ],
)
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "both"])
def test_closed_stdout_exits_silently(arguments: tuple[str, ...], both: bool) -> None:
    with closed_pipe() as pipe:
        found = subprocess.run(
            command(*arguments),
            cwd=TESTS,
            input=b"Hi\n",
            stdout=pipe,
            stderr=pipe if both else subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert found.returncode == 1
    assert b"Error" not in (found.stderr or b"")


@pytest.mark.parametrize(
    ("arguments", "code", "lines"),
    [
        (("run", "x", "-n", "3"), 0, 1),  # whose statistics come last
        (("chat", "-n", "3", "--verbose"), 0, 1),
        (("run", "x", "--no-such-option"), 2, 0),
        (("run", "x", "--temperature", "-1"), 2, 0),
        (("info", "/no/such/model"), 2, 0),
    ],
)
@pytest.mark.parametrize("end", ["pipe", "/dev/full"])
def test_closed_or_full_stderr_does_not_fail_command(
    arguments: tuple[str, ...], code: int, lines: int, end: str
) -> None:
    with closed_pipe() as pipe, Path("/dev/full").open("w") as full:
        found = subprocess.run(
            command(*arguments),
            cwd=TESTS,
            input=b"Hi\n",
            stdout=subprocess.PIPE,
            stderr=pipe if end == "pipe" else full,
            timeout=60,
            check=False,
        )
    assert (found.returncode, found.stdout.count(b"\n")) == (code, lines)


def test_run_batch_completes_with_closed_streams(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3}
    requests = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(20)]
    source.write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    with closed_pipe() as pipe:
        found = subprocess.run(
            command("run-batch", str(source), str(target)), cwd=TESTS, stdout=pipe, stderr=pipe, timeout=60, check=False
        )
    assert found.returncode == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [each["custom_id"] for each in requests]
    assert {answer["response"]["status_code"] for answer in answers} == {200}


def test_server_continues_with_closed_stderr() -> None:
    """The server keeps running when stderr is closed, as in `ferrule serve 2>&1 | head -1`."""
    process = subprocess.Popen(
        command("serve", "--port", "0"), cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        process.stdout.close()
        answers: list[int] = []

        def ask() -> None:
            body = json.dumps({"prompt": "x", "max_tokens": 5}).encode()
            completion = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(completion, timeout=60) as found:
                answers.append(found.status)

        while _health(url) != 200:
            assert process.poll() is None
        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [200] * 20
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def _health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
