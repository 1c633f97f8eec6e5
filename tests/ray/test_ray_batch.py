"""`ferrule run-batch --ray`: each line has one response, also if actors or the command are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.test_run_batch import chat_request, content_of, read, written
from ferrule._cli import main

TESTS = Path(__file__).parent.parent
KILLED = 10
"""Number of lines of the output after which a process is killed."""
KILL = """
import os, signal, sys
from ferrule._batch import files
from ferrule._cli import main, run_batch
from ray._private.state import actors

write, lines = files.BatchOutput.write, 0

def kill_at_line(self, answer):
    global lines
    write(self, answer)
    lines += 1
    if lines == {line}:
        os.kill({process}, signal.SIGKILL)

files.BatchOutput.write = kill_at_line
run_batch.INTERVALS = (0.0, 0.0)
sys.exit(main())
"""
"""The command, in which a process is killed when the output has some lines. It shows each change of its progress."""
ITSELF = "os.getpid()"
AN_ACTOR = "next(actor['Pid'] for actor in actors().values() if actor['State'] == 'ALIVE')"
SECONDS = 600
"""Timeout of a command."""
GREEDY = {"temperature": 0, "max_tokens": 4}


def run_batch(source: Path, target: Path, *options: str, killed: str | None = None) -> tuple[int, str]:
    """Runs the command; returns its exit code and stderr."""
    program = ["-m", "ferrule"] if killed is None else ["-c", KILL.format(line=KILLED, process=killed)]
    done = subprocess.run(
        [sys.executable, *program, "run-batch", str(source), str(target), *options],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    return done.returncode, done.stderr


def contents(path: Path) -> list[tuple[str, str | None]]:
    """Returns custom id and content of each response."""
    return [(answer["custom_id"], content_of(answer) if answer["response"] else None) for answer in read(path)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Requests, and their responses by the command without Ray."""
    folder = tmp_path_factory.mktemp("batch")
    # More lines than the two actors have places, so that some are sent after one of them was killed.
    requests: list[Any] = [chat_request(number, **GREEDY) for number in range(800)]
    requests[3] = "{"
    source, target = written(folder / "in.jsonl", *requests), folder / "local.jsonl"
    code, errors = run_batch(source, target)
    assert (code, "1 of 800 lines" in errors) == (1, True)
    return source, target


@pytest.mark.native
def test_killed_actor_loses_and_repeats_no_line(ray_cluster: str, local: tuple[Path, Path], tmp_path: Path) -> None:
    source, expected = local
    target = tmp_path / "out.jsonl"
    code, errors = run_batch(source, target, "--ray", ray_cluster, "--threads", "1", killed=AN_ACTOR)
    assert code == 1, errors
    assert contents(target) == contents(expected)
    shown = [int(line.split()[0]) for line in errors.splitlines() if " of 800 lines answered, " in line]
    assert shown == sorted(shown)
    assert shown[0] < 800 == shown[-1]


@pytest.mark.native
def test_rerun_resumes_after_kill_of_the_command(ray_cluster: str, local: tuple[Path, Path], tmp_path: Path) -> None:
    source, expected = local
    target = tmp_path / "out.jsonl"
    options = ("--ray", ray_cluster, "--threads", "2")
    assert run_batch(source, target, *options, killed=ITSELF)[0] == -signal.SIGKILL
    before = target.read_bytes()
    assert before.count(b"\n") == KILLED
    code, errors = run_batch(source, target, *options)
    assert code == 1, errors
    assert errors.startswith(f"resuming after {KILLED} lines, 1 error\n")
    assert "800 lines answered, 1 error" in errors
    assert target.read_bytes().startswith(before)
    assert contents(target) == contents(expected)
    assert set(read(target)[-1]["response"]["body"]) == set(read(expected)[-1]["response"]["body"])


def test_model_that_actors_cannot_load_is_one_error(ray_cluster: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", chat_request(0))
    target = tmp_path / "out.jsonl"
    code, errors = run_batch(source, target, "--ray", ray_cluster, "--max-model-len", "100000")
    assert code == 2, errors
    assert "error: max_model_len must be an integer from 1 to 2048" in errors
    assert "Traceback" not in errors
    assert read(target) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://localhost:10001", "ray must be HOST:PORT of the head node, auto, or local"),
        ("no host", "ray must be the address of a Ray cluster (Invalid address format: no host)"),
    ],
)
def test_invalid_address_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str, message: str
) -> None:
    ray = pytest.importorskip("ray")
    assert not ray.is_initialized()  # otherwise `ray.init` refuses any address
    source, target = written(tmp_path / "in.jsonl", chat_request(0)), tmp_path / "out.jsonl"
    assert main(["run-batch", str(source), str(target), "--ray", address]) == 2
    assert message in capsys.readouterr().err
    assert read(target) == []


def test_missing_ray_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("ferrule.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    source = written(tmp_path / "in.jsonl", chat_request(0))
    assert main(["run-batch", str(source), str(tmp_path / "out.jsonl"), "--ray", "auto"]) == 2
    assert "error: ferrule.ray requires Ray: pip install 'ferrule[ray]'\n" in capsys.readouterr().err
