"""`ferrule run-batch`: every line gets a response, and an interrupted run is resumed."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from cli.terminal import Terminal
from ferrule import AsyncLLM
from ferrule._batch import files, runner
from ferrule._batch.answers import Answer
from ferrule._cli import main
from ferrule.errors import EngineError, InvalidParameterError
from ferrule.server import batch_engine
from ferrule.server.batch_engine import BatchEngine

TESTS = Path(__file__).parent.parent
PROGRAM = """
import sys, fakes
fakes.install()
fakes.Engine.step_seconds = 0.002
fakes.Engine.slow_after = {}
fakes.Engine.max_num_seqs = 4
from ferrule._cli import main
sys.exit(main())
"""

Batch = Callable[..., tuple[int, list[dict[str, Any]], str]]


def chat_request(number: int, **body: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Say {number}"}],
        "max_tokens": 4,
        "temperature": 0,
        **body,
    }
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    content = path.read_text()
    assert not content or content.endswith("\n")
    return [json.loads(line) for line in content.splitlines()]


def content_of(answer: dict[str, Any]) -> str:
    return answer["response"]["body"]["choices"][0]["message"]["content"]


@pytest.fixture
def batch(fake_engine: type[fakes.Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Batch:
    """Runs lines through the command on the fake engine; returns the exit code, the answers and stderr."""
    fake_engine.max_num_seqs = 4

    def batch(*lines: object, options: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]], str]:
        source, target = written(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
        code = main(["run-batch", str(source), str(target), *options])
        return code, read(target) if target.exists() else [], capsys.readouterr().err

    return batch


def test_responses_have_order_and_ids_of_requests(batch: Batch) -> None:
    code, answers, err = batch(*(chat_request(number, max_tokens=1 + (7 * number) % 11) for number in range(40)))
    assert code == 0
    assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(40)]
    assert len({answer["id"] for answer in answers}) == 40
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert set(answer["response"]) == {"status_code", "request_id", "body"}
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        assert answer["response"]["body"]["object"] == "chat.completion"
    assert "40 lines answered, 0 errors" in err


def test_chat_completions_and_embeddings_endpoints(batch: Batch) -> None:
    others = [
        {"url": "/v1/completions", "body": {"model": "tiny", "prompt": "The capital", "max_tokens": 2}},
        {"url": "/v1/embeddings", "body": {"model": "tiny", "input": "The capital"}},
    ]
    _, answers, _ = batch(chat_request(0), *({"custom_id": each["url"], "method": "POST", **each} for each in others))
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 200]
    assert answers[1]["response"]["body"]["object"] == "text_completion"
    assert len(answers[2]["response"]["body"]["data"][0]["embedding"]) == 256


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("{", "invalid_json", "line 1 is not valid JSON: Expecting property name"),
        ("[" * 100_000, "invalid_json", "line 1 is not valid JSON: too deeply nested"),
        ("\\ud800", "invalid_json", "line 1 is not valid JSON: Expecting value"),
        ("[]", "invalid_request", "line 1 must be an object, got []"),
        ("{}", "invalid_request", "custom_id is missing"),
        ({**chat_request(0), "custom_id": 3}, "invalid_request", "custom_id must be a non-empty string, got 3"),
        ({**chat_request(0), "custom_id": ""}, "invalid_request", "custom_id must be a non-empty string, got ''"),
        ({**chat_request(0), "method": "GET"}, "invalid_request", "method must be 'POST', got 'GET'"),
        (
            {**chat_request(0), "url": "/v1/models"},
            "invalid_request",
            "url must be one of /v1/chat/completions, /v1/completions, /v1/embeddings, got '/v1/models'",
        ),
        ({**chat_request(0), "body": "x"}, "invalid_request", "body must be an object, got 'x'"),
        (
            {**chat_request(0), "priority": 1},
            "invalid_request",
            "unknown field 'priority'; the fields are custom_id, method, url, body",
        ),
        (chat_request(0, stream=True), "invalid_request", "body.stream must be false in a batch, got true"),
    ],
)
def test_invalid_line_gives_error_line(batch: Batch, line: object, code: str, message: str) -> None:
    exit_code, (first, second), err = batch(line, chat_request(1))
    assert exit_code == 1
    assert first["response"] is None
    assert first["error"]["code"] == code
    assert message in first["error"]["message"]
    assert second["response"]["status_code"] == 200
    assert "2 lines answered, 1 error, " in err
    assert "error: 1 of 2 lines of " in err
    named = isinstance(line, dict) and line.get("custom_id") is not None
    assert f"out.jsonl are errors; the first is line 1{' (' if named else ': '}" in err


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "gpt-4"}, 404, "unknown model 'gpt-4'; choose one of: tiny"),
        ({"temperature": -1}, 400, "temperature must be a number from 0 to 100, got -1.0"),
        ({"n": 0}, 400, "n must be an integer from 1 to 128, got 0"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, 400, "2048"),
    ],
)
def test_rejected_request_has_http_status(batch: Batch, body: dict[str, Any], status: int, message: str) -> None:
    _, (first, second), _ = batch(chat_request(0, **body), chat_request(1))
    assert (first["custom_id"], first["response"]["status_code"], first["error"]) == ("r0", status, None)
    assert message in first["response"]["body"]["error"]["message"]
    assert second["response"]["status_code"] == 200


def test_served_model_name_is_an_alias(batch: Batch) -> None:
    _, answers, _ = batch(
        chat_request(0),
        {**chat_request(0, model="gpt-4o"), "custom_id": "other"},
        options=("--served-model-name", "gpt-4o", "--quiet"),
    )
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200]
    assert content_of(answers[0]) == content_of(answers[1])


def test_unknown_model_in_every_request_is_reported_before_running(batch: Batch, tmp_path: Path) -> None:
    lines = ["{", chat_request(0, model="gpt-4o mini"), chat_request(1, model="other")]
    code, answers, err = batch(*lines)
    assert (code, answers, (tmp_path / "out.jsonl").exists()) == (2, [], False)
    assert "error: model must be tiny in" in err
    code, answers, _ = batch(*lines, options=("--served-model-name", "gpt-4o mini"))
    assert [answer["response"] and answer["response"]["status_code"] for answer in answers] == [None, 200, 404]


def test_duplicate_custom_id_gives_error_line(batch: Batch, tmp_path: Path) -> None:
    lines = [chat_request(0), "", chat_request(1), chat_request(0), chat_request(0)]
    for _ in range(2):  # at once, and where only the last one is left
        code, answers, err = batch(*lines)
        assert code == 1
        assert [answer["error"] and answer["error"]["code"] for answer in answers[:2]] == [None, None]
        for answer in answers[2:]:
            message = "custom_id must be unique, got 'r0' again (first in line 1)"
            assert answer["error"] == {"code": "duplicate_custom_id", "message": message}
        assert "the first is line 3 ('r0'): custom_id must be unique, got 'r0' again (first in line 1)" in err
        target = tmp_path / "out.jsonl"
        target.write_bytes(b"".join(target.read_bytes().splitlines(keepends=True)[:3]))


def test_retry_errors_runs_failed_requests_again(batch: Batch, tmp_path: Path) -> None:
    target, link = tmp_path / "real.jsonl", tmp_path / "out.jsonl"
    link.symlink_to(target)
    target.touch(mode=0o600)
    lines = [chat_request(0), chat_request(1, model="gpt-4o"), "{", chat_request(3, model="gpt-4o"), chat_request(4)]
    code, first, err = batch(*lines[:4])
    assert code == 1
    assert "3 of 4 lines of " in err
    assert "unknown model 'gpt-4o'" in err
    options = ("--served-model-name", "gpt-4o")
    code, same, err = batch(*lines[:4], options=options)
    assert (code, same) == (1, first)  # nothing is asked again that was not told to be
    assert "--retry-errors runs these requests again" in err
    code, answers, err = batch(*lines, options=(*options, "--retry-errors"))
    assert code == 1
    assert "5 lines answered, 1 error, " in err
    assert answers[0] == first[0]
    assert [answer["custom_id"] for answer in answers] == ["r0", "r1", None, "r3", "r4"]
    assert [answer["response"] and answer["response"]["status_code"] for answer in answers] == [
        200,
        200,
        None,
        200,
        200,
    ]
    lines[2] = chat_request(2)
    lines[2]["custom_id"] = None  # the answer that is there has none
    assert batch(*lines, options=("--retry-errors",))[1][:2] == answers[:2]
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "real.jsonl"]


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ({"response": None, "error": None}, "None: None"),
        ({"response": {"status_code": 500, "body": 3}, "error": None}, "500: None"),
        ({"response": {"status_code": 200}, "error": {"message": "expired"}}, "expired"),
        ({"response": [], "error": "late"}, "'late'"),
    ],
)
def test_errors_written_by_other_programs_count_as_errors(
    batch: Batch, tmp_path: Path, answer: Any, failure: str
) -> None:
    (tmp_path / "out.jsonl").write_text(json.dumps({"custom_id": "r0", **answer}) + "\n")
    code, _, err = batch(chat_request(0))
    assert code == 1
    assert f"the first is line 1 ('r0'): {failure}; " in err
    assert batch(chat_request(0), options=("--retry-errors",))[0] == 0


def test_pipes_are_rejected(batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, pipe = written(tmp_path / "in.jsonl", chat_request(0)), tmp_path / "pipe"
    os.mkfifo(pipe)
    for words, message in [
        (("-", "-"), "INPUT and OUTPUT must be files"),
        ((str(source), "-"), "INPUT and OUTPUT must be files"),
        ((str(pipe), str(tmp_path / "out.jsonl")), "input_file must be a regular file, got"),
        ((str(source), str(pipe)), "output_file must be a regular file, got"),
    ]:
        assert main(["run-batch", *words]) == 2
        assert message in capsys.readouterr().err


def test_line_over_limit_gives_error_line(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 300)
    _, answers, _ = batch("x" * 2_000_000, chat_request(1), chat_request(2, user="y" * 300))
    assert answers[0]["error"]["code"] == answers[2]["error"]["code"] == "line_too_long"
    assert answers[1]["response"]["status_code"] == 200


def test_empty_input(batch: Batch) -> None:
    assert batch()[:2] == (0, [])
    assert batch("", "   ")[:2] == (0, [])


def test_rerun_answers_missing_lines(batch: Batch, tmp_path: Path) -> None:
    lines = [chat_request(0), "{", chat_request(2), "", chat_request(3), chat_request(4)]
    _, whole, _ = batch(*lines)
    target = tmp_path / "out.jsonl"
    content = target.read_bytes()
    kept = content.split(b"\n")[:2]
    for torn in (b"", b'{"id": "batch', content.split(b"\n")[2]):  # the last is complete except for its newline
        target.write_bytes(b"".join(line + b"\n" for line in kept) + torn)
        code, answers, err = batch(*lines)
        assert code == 1  # of the second line, however old its error is
        assert "resuming after 2 lines, 1 error\n" in err
        assert answers[:2] == whole[:2]
        assert [content_of(answer) for answer in answers[2:]] == [content_of(answer) for answer in whole[2:]]
    code, answers, err = batch(*lines)
    assert code == 1
    assert "all requests have responses" in err
    _, more, _ = batch(*lines, chat_request(9))  # requests that were added are answered too
    assert more[: len(answers)] == answers
    assert more[-1]["custom_id"] == "r9"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"custom_id": "other", "response": null, "error": null}\n',
            "in.jsonl, which has custom_id 'r0', not 'other' for line 1, got",
        ),
        (b"a diary\n", "output_file must be a file of batch responses (line 1 is not one), got"),
        (b"[" * 100_000 + b"\n", "output_file must be a file of batch responses (line 1 is not one), got"),
        (
            b'{"custom_id": "r0", "response": null, "error": null}\n' * 2,
            "in.jsonl, which has no request for line 2, got",
        ),
    ],
)
def test_unrelated_output_file_is_rejected_and_kept(
    batch: Batch, tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_bytes(content)
    source = written(tmp_path / "in.jsonl", chat_request(0))
    assert main(["run-batch", str(source), str(tmp_path / "out.jsonl")]) == 2
    assert (tmp_path / "out.jsonl").read_bytes() == content
    assert message in capsys.readouterr().err


def test_output_file_errors_name_the_file(batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"a diary\n")
    source = written(tmp_path / "in.jsonl", chat_request(0))
    main(["run-batch", str(source), str(tmp_path / "out.jsonl")])
    assert "output_file must be a file of batch responses (line 1 is not one), got" in capsys.readouterr().err
    assert main(["run-batch", str(source), str(source)]) == 2
    assert "the same file" in capsys.readouterr().err
    assert main(["run-batch", str(source), str(tmp_path / "no" / "out.jsonl")]) == 2
    assert "output_file must be a writable file (No such file or directory)" in capsys.readouterr().err


def test_locked_output_file_is_rejected(batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = written(tmp_path / "in.jsonl", chat_request(0)), tmp_path / "out.jsonl"
    with target.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["run-batch", str(source), str(target)]) == 2
    assert "error: output_file must be a file that no other process writes, got" in capsys.readouterr().err


def test_pending_lines_are_bounded(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number of lines is processed while an earlier answer takes long."""
    monkeypatch.setattr(runner, "MAX_PENDING_LINES", 8)
    reads: list[int] = []
    next_line = files.BatchInput.__next__
    write = files.BatchOutput.write
    done: list[Answer] = []

    def note(self: files.BatchInput) -> files.Line:
        line = next_line(self)
        reads.append(line.number - len(done))
        return line

    def count(self: files.BatchOutput, answer: Answer) -> None:
        done.append(answer)
        write(self, answer)

    monkeypatch.setattr(files.BatchInput, "__next__", note)
    monkeypatch.setattr(files.BatchOutput, "write", count)
    long = [chat_request(number, max_tokens=200 if number % 16 == 0 else 1, ignore_eos=True) for number in range(64)]
    _, answers, _ = batch(*long)
    assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(64)]
    assert max(reads) <= 9


def test_engine_death_ends_run_and_rerun_resumes(fake_engine: type[fakes.Engine], batch: Batch, tmp_path: Path) -> None:
    lines = [chat_request(number, max_tokens=20, ignore_eos=True) for number in range(30)]
    fake_engine.dies_at = 60
    code, answers, err = batch(*lines)
    assert code == 1
    assert "the engine" in err
    assert len(answers) < 30
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    fake_engine.dies_at = None
    code, answers, _ = batch(*lines)
    assert (code, len(answers)) == (0, 30)


def test_missing_fastapi_is_reported(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("ferrule._cli.run_batch.find_spec", lambda name: None if name == "fastapi" else find(name))
    code, answers, err = batch(chat_request(0))
    assert (code, answers, err) == (2, [], "error: run-batch requires fastapi: pip install 'ferrule[server]'\n")


def start(source: Path, target: Path, *options: str, slow_after: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(slow_after), "run-batch", str(source), str(target), *options],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Requests, and the contents of their responses in a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    requests = (chat_request(number, ignore_eos=True, temperature=1, seed=number) for number in range(160))
    source, target = written(folder / "in.jsonl", *requests), folder / "out.jsonl"
    assert b"160 lines answered, 0 errors" in start(source, target).communicate(timeout=120)[1]
    return source, [content_of(answer) for answer in read(target)]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_rerun_resumes_after_kill(
    uninterrupted: tuple[Path, list[str]], tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    source, expected = uninterrupted
    target = tmp_path / "out.jsonl"
    for lines in (10, 70):
        process = start(source, target, slow_after=64)  # so that it still runs when the signal arrives
        deadline = time.monotonic() + 180
        while not target.exists() or target.read_bytes().count(b"\n") < lines:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        assert b"Traceback" not in errors
        assert (b"interrupted; the same command continues" in errors) == (sent == signal.SIGINT)
        before = read(target)  # whole lines alone
        assert lines <= len(before) < 160
    process = start(source, target)
    assert f"resuming after {len(before)} lines".encode() in process.communicate(timeout=120)[1]
    answers = read(target)
    assert answers[: len(before)] == before
    assert [content_of(answer) for answer in answers] == expected


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_kill_during_retry_errors_keeps_output_file(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    source, target, new = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / ".out.jsonl.retry"
    lines = [chat_request(number, model="tiny" if number % 2 else "gpt", ignore_eos=True) for number in range(160)]
    written(source, *lines)
    assert b"error: 80 of 160 lines" in start(source, target).communicate(timeout=120)[1]
    before = read(target)
    options = ("--served-model-name", "gpt", "--retry-errors")
    process = start(source, target, *options, slow_after=44)
    deadline = time.monotonic() + 180
    while not new.exists() or new.read_bytes().count(b"\n") < 40:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == code
    between = read(target)
    failed = [answer["response"]["status_code"] for answer in between].count(404)
    if sent == signal.SIGKILL:
        assert between == before
    else:  # what was answered until then is kept
        assert failed <= 60
        assert between[-80:] == before[-80:] or failed < 40
    process = start(source, target, *options)
    assert f"resuming after 160 lines, {failed} error".encode() in process.communicate(timeout=60)[1]
    answers = read(target)
    assert process.returncode == 0
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    assert answers[1::2] == before[1::2]
    assert not new.exists()


def test_progress_fits_on_one_line(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    written(source, *(chat_request(number, ignore_eos=True, max_tokens=30) for number in range(80)))
    program = f"from ferrule._cli import status; status.DELAY = 0\n{PROGRAM.format(None)}"
    with Terminal([sys.executable, "-c", program, "run-batch", str(source), str(target)], size=(24, 20)) as terminal:
        assert terminal.end() == 0
    *shown, last = terminal.written.split("\r\x1b[K")
    assert last.startswith("80 lines answered, 0 errors, ")
    assert [line for line in shown if " of 80 lines answ" in line]
    assert all(len(line.rstrip("\r")) < 20 for line in shown)


def test_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    written(source, *(chat_request(number) for number in range(50)))
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(None), "run-batch", str(source), str(target)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        preexec_fn=lambda: (
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
        ),
        check=False,
    )
    assert process.returncode == 1
    assert f"{target}: cannot be written: File too large" in process.stderr
    assert 0 < len(read(target)) < 50


def test_engine_is_closed_if_the_application_cannot_be_created(
    engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    llms: list[AsyncLLM] = []

    def load(*arguments: Any, **options: Any) -> AsyncLLM:
        llms.append(AsyncLLM(*arguments, **options))
        return llms[-1]

    engine.max_num_seqs = 1 << 30
    monkeypatch.setattr(batch_engine, "AsyncLLM", load)
    with pytest.raises(InvalidParameterError, match="max_concurrent_requests must be"):
        BatchEngine(None, ["tiny"])
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(llms[0].check_health())


@pytest.mark.native
def test_embedded_model_output_is_reproducible(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", *(chat_request(number, temperature=0) for number in range(20)))
    names = [f"out{number}.jsonl" for number in range(2)]
    for name in names:
        subprocess.run(
            [sys.executable, "-m", "ferrule", "run-batch", str(source), str(tmp_path / name)], check=True, timeout=120
        )
    first, second = (read(tmp_path / name) for name in names)
    assert [content_of(answer) for answer in first] == [content_of(answer) for answer in second]
    assert len(first) == 20
