"""POST /page/pdf-text: valid, invalid and hostile PDF files."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import fakes
from ferrule.server import ServerSettings, pdf_text, pdf_worker
from pdf_files import pdf
from server.live import Live, serving


def post(live: Live, body: bytes) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    connection.request("POST", "/page/pdf-text", body, {"Content-Type": "application/pdf"})
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found.get("error", found)


def program(folder: Path, code: str) -> Path:
    """Returns a program that runs code before it reads a file."""
    path = folder / "worker.py"
    path.write_text(
        f"import os, sys, time\nsys.path.append({str(pdf_text.WORKER.parent)!r})\nimport pdf_worker\n"
        f"{code}\npdf_worker.main()\n"
    )
    return path


def test_the_text_of_all_pages_is_returned(live: Live) -> None:
    assert post(live, pdf(["One page", "Another page"])) == (
        200,
        {"text": "One page\n\nAnother page", "pages": 2, "truncated": False},
    )
    assert post(live, pdf([""]))[1]["text"] == ""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "it does not begin with %PDF-"),
        (b"<html>", "it does not begin with %PDF-"),
        (b"%PDF-1.4\n", "Error: "),
        (pdf(["text"])[:200], "Error: "),
    ],
    ids=["empty", "html", "header", "cut"],
)
def test_an_invalid_file_is_refused(live: Live, body: bytes, reason: str) -> None:
    status, error = post(live, body)
    assert (status, error["code"]) == (400, "invalid_pdf")
    assert str(error["message"]).startswith("the PDF file cannot be read: ")
    assert reason in str(error["message"])


@pytest.mark.parametrize(
    "work",
    ["bytearray(pdf_worker.MEMORY)", "[None for _ in iter(int, 1)]", "time.sleep(60)", "os.abort()"],
    ids=["memory", "memory and time", "waiting", "crash"],
)
def test_a_hostile_file_ends_only_its_process(
    live: Live, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = program(tmp_path, f"pdf_worker.CPU_SECONDS = 2\npdf_worker.extract = lambda data: {work}")
    with monkeypatch.context() as patch:
        patch.setattr(pdf_text, "WORKER", hostile)
        patch.setattr(pdf_text, "SECONDS", 5.0)
        status, error = post(live, pdf(["text"]))
    assert (status, error["code"]) == (422, "pdf_too_complex")
    assert post(live, pdf(["Still there"]))[0] == 200


def test_files_that_find_no_place_in_the_queue_are_refused(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    waiting = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    monkeypatch.setattr(pdf_text, "WORKER", program(tmp_path, waiting))
    monkeypatch.setattr(pdf_text, "MAX_WAITING", 1)
    with ThreadPoolExecutor(pdf_text.PROCESSES + 2) as pool:
        try:
            answers = [pool.submit(post, live, pdf(["text"])) for _ in range(pdf_text.PROCESSES + 2)]
            done, _ = wait(answers, timeout=60, return_when=FIRST_COMPLETED)
            ((status, error),) = [answer.result() for answer in done]
            assert (status, error["code"]) == (503, "queue_full")
        finally:
            gate.touch()
        assert sorted(answer.result(60)[0] for answer in answers) == [200] * (pdf_text.PROCESSES + 1) + [503]


def test_the_process_does_not_receive_secrets(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "pdf_worker.extract = lambda data: {'text': ' '.join(os.environ), 'pages': 1, 'truncated': False}"
    monkeypatch.setattr(pdf_text, "WORKER", program(tmp_path, shown))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    names = str(post(live, pdf(["text"]))[1]["text"]).split()
    assert "PATH" in names
    assert "OPENAI_API_KEY" not in names


def test_missing_library_is_named(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_text, "WORKER", program(tmp_path, "sys.modules['pypdf'] = None"))
    status, error = post(live, pdf(["text"]))
    assert (status, error["code"]) == (500, "missing_dependency")
    assert "pip install pypdf" in str(error["message"])


def test_a_large_body_is_refused(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(max_body_bytes=100)) as live:
        assert post(live, pdf(["text"]))[0] == 413


def test_there_is_no_route_without_the_page(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(page=False)) as live:
        assert post(live, pdf(["text"]))[0] == 404


def test_limits_of_pages_and_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pdf(["One", "Two", "Three"])
    monkeypatch.setattr(pdf_worker, "MAX_PAGES", 2)
    assert pdf_worker.extract(data) == {"text": "One\n\nTwo", "pages": 3, "truncated": True}
    monkeypatch.setattr(pdf_worker, "MAX_CHARACTERS", 2)
    assert pdf_worker.extract(data) == {"text": "On", "pages": 3, "truncated": True}
