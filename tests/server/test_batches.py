"""OpenAI's files and batches: its own client against a live server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

import fakes
from ferrule import AsyncLLM
from ferrule.errors import InvalidParameterError
from ferrule.server import Models, ServerSettings, create_app
from ferrule.server.batches import files, jobs, stages
from server.live import Live, serving, until

ENDED = {"completed", "failed", "cancelled", "expired"}


def chat_request(number: int, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def lines(*requests: object) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


class Client(openai.OpenAI):
    """OpenAI's client with steps that most tests take."""

    def upload(self, *requests: object, name: str = "in.jsonl") -> str:
        return self.files.create(file=(name, lines(*requests)), purpose="batch").id

    def begin(self, *requests: object, **fields: Any) -> Batch:
        fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
        return self.batches.create(input_file_id=self.upload(*requests), **fields)

    def ended(self, batch: Batch) -> Batch:
        until(lambda: self.batches.retrieve(batch.id).status in ENDED)
        return self.batches.retrieve(batch.id)

    def read(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        return [json.loads(line) for line in self.files.content(file_id).text.splitlines()]


@contextmanager
def served(
    directory: Path, *, llm: Callable[[], AsyncLLM] = AsyncLLM, **settings: Any
) -> Generator[tuple[Live, Client]]:
    with (
        serving(ServerSettings(files_dir=str(directory), **settings), llm=llm) as live,
        Client(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield live, client


@pytest.fixture
def client(engine: type[fakes.Engine], tmp_path: Path) -> Iterator[Client]:
    """A client of a server with a fake engine."""
    engine.max_num_seqs = 4
    with served(tmp_path) as (_, client):
        yield client


def code(caught: pytest.ExceptionInfo[Any]) -> tuple[int, str | None, str | None]:
    error = caught.value
    assert isinstance(error, openai.APIStatusError)
    return error.status_code, error.code, error.param


def test_uploaded_file_is_returned_listed_and_deleted(client: Client) -> None:
    content = bytes(range(256)) * 1000 + b"\r\n--almost"
    made = client.files.create(file=("Ünï q.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (
        len(content),
        "Ünï q.jsonl",
        "batch",
        "processed",
    )
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    others = [client.upload(chat_request(each)) for each in range(4)]
    assert [file.id for file in client.files.list()] == [*reversed(others), made.id]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == [made.id, *others]
    assert list(client.files.list(purpose="batch_output")) == []
    assert client.files.delete(made.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(made.id)
        assert code(caught) == (404, "file_not_found", "file_id")


def test_batch_answers_every_request(client: Client) -> None:
    asked = [chat_request(each) for each in range(20)]
    batch = client.begin(*asked, metadata={"a": "b"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"a": "b"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = client.ended(batch)
    assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    answers = client.read(batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"r{each}" for each in range(20)]
    for asked_for, answer in zip(asked, answers, strict=True):
        direct = client.chat.completions.create(model="tiny", **asked_for["body"])
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    output = client.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "The capital", "max_tokens": 2}), ("/v1/embeddings", {"input": "The capital"})],
)
def test_other_endpoints(client: Client, url: str, body: dict[str, Any]) -> None:
    batch = client.begin({"custom_id": "a", "method": "POST", "url": url, "body": body}, endpoint=url)
    (answer,) = client.read(client.ended(batch).output_file_id)
    assert answer["response"]["status_code"] == 200


def test_requests_with_errors_are_in_the_error_file(client: Client) -> None:
    batch = client.ended(client.begin(chat_request(0), chat_request(1, temperature=-1), chat_request(2, model="none")))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert [answer["custom_id"] for answer in client.read(batch.output_file_id)] == ["r0"]
    found = client.read(batch.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in found] == [("r1", 400), ("r2", 404)]
    assert found[0]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ("empty_file", None)),
        (b"{\n", ("invalid_json", 1)),
        (lines(chat_request(0), chat_request(0)), ("duplicate_custom_id", 2)),
        (lines(chat_request(0), {**chat_request(1), "url": "/v1/embeddings"}), ("mismatched_endpoint", 2)),
        (lines({**chat_request(0), "url": "/v1/files"}), ("invalid_request", 1)),
        (lines(*map(chat_request, range(6))), ("too_many_requests", None)),
        (lines(chat_request(0, messages=[{"role": "user", "content": "a" * 5000}])), ("line_too_long", 1)),
    ],
)
def test_invalid_input_file_fails_the_batch(
    engine: type[fakes.Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes,
    expected: tuple[str, int | None],
) -> None:  # fmt: skip
    monkeypatch.setattr(stages, "MAX_REQUESTS", 5)
    with served(tmp_path, max_body_bytes=4096) as (_, client):
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = client.ended(batch)
        assert (batch.status, batch.output_file_id) == ("failed", None)
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [(each.code, each.line) for each in batch.errors.data] == [expected]


def test_cancelled_batch_keeps_its_responses(engine: type[fakes.Engine], client: Client) -> None:
    engine.step_seconds = 0.01
    asked = [chat_request(each, max_tokens=4 if each < 4 else 1900, ignore_eos=True) for each in range(40)]
    batch = client.begin(*asked)

    def has_responses() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= 2

    until(has_responses)
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    batch = client.ended(batch)
    assert batch.status == "cancelled"
    assert None not in (batch.cancelling_at, batch.cancelled_at)
    done, rest = client.read(batch.output_file_id), client.read(batch.error_file_id)
    assert [each["custom_id"] for each in done + rest] == [f"r{each}" for each in range(40)]
    assert len(done) >= 2
    assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.cancel(batch.id)
    assert code(caught) == (400, "batch_ended", "batch_id")


def test_batch_expires(engine: type[fakes.Engine], client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "WINDOW_SECONDS", 4)
    engine.step_seconds = 0.02
    asked = [chat_request(each, max_tokens=1 if each < 2 else 1000, ignore_eos=True) for each in range(8)]
    batch = client.ended(client.begin(*asked))
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert [each["custom_id"] for each in client.read(batch.output_file_id)] == ["r0", "r1"]
    assert {each["error"]["code"] for each in client.read(batch.error_file_id)} == {"batch_expired"}


def test_batches_are_listed_in_pages(client: Client) -> None:
    made = [client.begin(chat_request(0)) for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == [batch.id for batch in reversed(made)]
    page = client.batches.list(limit=2, after=made[4].id)
    assert ([batch.id for batch in page.data], page.has_more) == ([made[3].id, made[2].id], True)


def test_interrupted_batch_continues_after_a_restart(engine: type[fakes.Engine], tmp_path: Path) -> None:
    engine.max_num_seqs = 2
    engine.step_seconds = 0.01
    with served(tmp_path) as (live, client):
        first = client.begin(
            *(chat_request(each, max_tokens=8 if each < 4 else 500, ignore_eos=True) for each in range(30))
        )
        second = client.begin(chat_request(0))

        def has_responses() -> bool:
            counts = client.batches.retrieve(first.id).request_counts
            return counts is not None and counts.completed >= 3

        until(has_responses)
        live.end()
        live.thread.join(60)
        assert not live.thread.is_alive(), "the drain waited for the batch"
    answered = (tmp_path / "batches" / f"{first.id}.answers.jsonl").read_bytes().splitlines()
    assert 3 <= len(answered) < 30
    engine.step_seconds = 0
    with served(tmp_path) as (_, client):
        assert client.batches.retrieve(first.id).status == "in_progress"
        batch = client.ended(first)
        assert batch.status == "completed"
        answers = client.files.content(batch.output_file_id or "").read().splitlines()
        assert answers[: len(answered)] == answered, "answered requests ran again"
        assert [json.loads(each)["custom_id"] for each in answers] == [f"r{each}" for each in range(30)]
        assert client.ended(second).status == "completed"
    assert not list((tmp_path / "batches").glob("*.answers.jsonl"))


def test_batch_that_expired_while_no_server_ran_keeps_its_responses(engine: type[fakes.Engine], tmp_path: Path) -> None:
    engine.step_seconds = 0.02
    with served(tmp_path) as (_, client):
        batch = client.begin(*(chat_request(each, max_tokens=1900, ignore_eos=True) for each in range(5)))
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    record = tmp_path / "batches" / f"{batch.id}.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "expires_at": 1}))
    with served(tmp_path) as (_, client):
        batch = client.ended(batch)
        assert batch.status == "expired"
        assert len(client.read(batch.error_file_id)) == 5


def test_requests_of_batches_have_a_lower_priority(engine: type[fakes.Engine], client: Client) -> None:
    given: list[int] = []
    add = engine.add_request

    def note(self: fakes.Engine, prompt: list[int], params: str, *args: Any, **kwargs: Any) -> int:
        given.append(json.loads(params)["priority"])
        return add(self, prompt, params, *args, **kwargs)

    engine.add_request = note  # type: ignore[method-assign]
    client.ended(client.begin(chat_request(0), chat_request(1, priority=-5), chat_request(2, priority=1 << 22)))
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert given == [jobs.PRIORITY, jobs.PRIORITY, 1 << 22, 0]


def test_full_queue_delays_a_batch(engine: type[fakes.Engine], tmp_path: Path) -> None:
    engine.max_num_seqs = 4
    with served(tmp_path, llm=lambda: AsyncLLM(max_queued_requests=1)) as (_, client):
        batch = client.ended(client.begin(*(chat_request(each) for each in range(12))))
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert len(client.read(batch.output_file_id)) == 12


def test_batches_do_not_need_the_api_keys_of_the_server(engine: type[fakes.Engine], tmp_path: Path) -> None:
    with served(tmp_path, api_keys=("secret",)) as (_, client):
        with pytest.raises(openai.AuthenticationError):
            client.files.list()
        client.api_key = "secret"
        assert client.ended(client.begin(chat_request(0))).error_file_id is None


def test_engine_failure_fails_the_batch(engine: type[fakes.Engine], client: Client) -> None:
    engine.dies_at = 20
    batch = client.ended(client.begin(*(chat_request(each, max_tokens=8, ignore_eos=True) for each in range(30))))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].code == "engine_unavailable"
    rest = client.read(batch.error_file_id)
    assert rest[-1]["error"]["code"] == "batch_failed"


@pytest.mark.parametrize(
    ("fields", "status", "error", "param"),
    [
        ({"input_file_id": "file-" + "0" * 32}, 404, "file_not_found", "file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "file_not_found", "file_id"),
        ({"endpoint": "/v1/models"}, 400, "invalid_type", "endpoint"),
        ({"completion_window": "1h"}, 400, "invalid_type", "completion_window"),
        ({"metadata": {"a" * 65: "b"}}, 400, "invalid_type", "metadata"),
        ({"metadata": {"a": "b" * 513}}, 400, "invalid_type", "metadata"),
        ({"metadata": {str(each): "b" for each in range(17)}}, 400, "invalid_type", "metadata"),
        (
            {"extra_body": {"output_expires_after": {"seconds": 1}}},
            400,
            "unsupported_parameter",
            "output_expires_after",
        ),
    ],
)
def test_invalid_batches_are_refused(
    client: Client, fields: dict[str, Any], status: int, error: str, param: str
) -> None:
    given = {"input_file_id": client.upload(chat_request(0)), "endpoint": "/v1/chat/completions"}
    with pytest.raises(openai.APIStatusError) as caught:
        client.batches.create(**{"completion_window": "24h", **given, **fields})  # type: ignore[arg-type]
    assert code(caught) == (status, error, param)


@pytest.mark.parametrize(
    "path", ["files/..%2f..%2fsecret", "files/.lock", "files/%2fetc%2fpasswd/content", "batches/x"]
)
def test_ids_name_nothing_outside_the_directory(client: Client, tmp_path: Path, path: str) -> None:
    (tmp_path.parent / "secret").write_text("hidden")
    with pytest.raises(openai.NotFoundError) as caught:
        client.get(f"/{path}", cast_to=object)
    assert "hidden" not in caught.value.message


def form(*parts: str) -> tuple[bytes, dict[str, str]]:
    body = "".join(f"--X\r\n{part}\r\n" for part in parts) + "--X--\r\n"
    return body.encode(), {"Content-Type": "multipart/form-data; boundary=X"}


FILE = 'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}'
PURPOSE = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ((b"{}", {"Content-Type": "application/json"}), "invalid_type", None),
        ((b"--X\r\n", {"Content-Type": "multipart/form-data; boundary=X"}), "invalid_multipart", None),
        ((b"--Xy", {"Content-Type": "multipart/form-data; boundary=X"}), "invalid_multipart", None),
        ((b"y" * 9000, {"Content-Type": "multipart/form-data; boundary=X"}), "invalid_multipart", None),
        (form("Content-Type: text/plain\r\n\r\n{}", PURPOSE), "invalid_multipart", None),
        (form(FILE), "missing_required_parameter", "purpose"),
        (form(PURPOSE), "missing_required_parameter", "file"),
        (form(FILE, FILE, PURPOSE), "invalid_value", "file"),
        (form(FILE, PURPOSE.replace("batch", "vision")), "invalid_value", "purpose"),
        (form(FILE, PURPOSE + "h" * 2000), "invalid_value", "purpose"),
        (form(FILE.replace("a.jsonl", "a" * 300), PURPOSE), "invalid_value", "file"),
        (form(FILE.replace('; filename="a.jsonl"', ""), PURPOSE), "invalid_value", "file"),
        (
            form(FILE, PURPOSE, PURPOSE.replace("purpose", "expires_after[seconds]")),
            "unsupported_parameter",
            "expires_after",
        ),
        (form(FILE, PURPOSE, PURPOSE.replace("purpose", "other")), "unknown_parameter", "other"),
    ],
)
def test_invalid_uploads_are_refused_and_leave_no_file(
    engine: type[fakes.Engine], tmp_path: Path, body: tuple[bytes, dict[str, str]], error: str, param: str | None
) -> None:
    with served(tmp_path) as (live, _):
        found = live.request("/v1/files", body[0], headers=body[1])
        assert (found.status, found.error["code"], found.error["param"]) == (400, error, param)
        assert live.request("/v1/files").json["data"] == []
        assert list((tmp_path / "files").iterdir()) == []


def test_fields_may_precede_and_follow_the_file(engine: type[fakes.Engine], tmp_path: Path) -> None:
    with served(tmp_path) as (live, _):
        for body, headers in (form(FILE, PURPOSE), form(PURPOSE, FILE)):
            made = live.request("/v1/files", b"preamble\r\n" + body + b"epilogue", headers=headers).json
            assert live.request(f"/v1/files/{made['id']}/content").body == b"{}"


def test_sizes_and_numbers_are_limited(
    engine: type[fakes.Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, max_file_bytes=1 << 20, files_quota=2 << 20, max_body_bytes=1 << 16) as (_, client):
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("a", b"a" * ((1 << 20) + 1)), purpose="batch")
        assert code(caught) == (413, "file_too_large", "file")
        kept = client.files.create(file=("a", b"a" * (1 << 20)), purpose="batch").id
        client.files.create(file=("a", b"a" * (1 << 20)), purpose="batch")
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(file=("a", b"a"), purpose="batch")
        assert code(caught) == (400, "files_full", None)
        client.files.delete(kept)
        monkeypatch.setattr(files, "MAX_FILES", 2)
        client.upload(chat_request(0))
        with pytest.raises(openai.BadRequestError, match="at most 2 files"):
            client.upload(chat_request(0))


def test_output_over_the_quota_fails_the_batch(engine: type[fakes.Engine], tmp_path: Path) -> None:
    with served(tmp_path, files_quota=20_000) as (_, client):
        batch = client.ended(client.begin(*(chat_request(each) for each in range(50))))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "files_full"
        assert client.read(batch.output_file_id)


def test_active_batches_are_limited_and_old_ones_removed(
    engine: type[fakes.Engine], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_ACTIVE", 1)
    monkeypatch.setattr(jobs, "MAX_BATCHES", 2)
    made = [client.ended(client.begin(chat_request(each))) for each in range(3)]
    assert [batch.id for batch in client.batches.list()] == [made[2].id, made[1].id]
    engine.step_seconds = 0.02
    running = client.begin(chat_request(0, max_tokens=500, ignore_eos=True))
    with pytest.raises(openai.BadRequestError) as caught:
        client.begin(chat_request(1))
    assert code(caught) == (400, "too_many_batches", None)
    with pytest.raises(openai.ConflictError) as conflict:
        client.files.delete(running.input_file_id)
    assert code(conflict) == (409, "file_in_use", "file_id")
    client.batches.cancel(running.id)
    client.ended(running)
    assert client.files.delete(running.input_file_id).deleted


@pytest.mark.parametrize(
    ("path", "param"),
    [("/v1/batches?limit=0", "limit"), ("/v1/batches?limit=a", "limit"), ("/v1/files?order=up", "order")],
)
def test_query_parameters_are_checked(engine: type[fakes.Engine], tmp_path: Path, path: str, param: str) -> None:
    with served(tmp_path) as (live, _):
        found = live.request(path)
        assert (found.status, found.error["param"]) == (400, param)
        assert found.error["message"].startswith(f"{param} must be ")


def test_routes_without_a_directory_say_how_to_enable_them(live: Live) -> None:
    for method, path in [("GET", "files"), ("GET", "batches"), ("DELETE", "files/a"), ("POST", "batches/a/cancel")]:
        found = live.request(f"/v1/{path}", method=method)
        assert (found.status, found.error["code"]) == (404, "batches_disabled")
        assert "--files-dir" in found.error["message"]


def test_directory_serves_one_server(tmp_path: Path) -> None:
    app = create_app(Models(), ServerSettings(files_dir=str(tmp_path)))
    with pytest.raises(InvalidParameterError, match="files_dir must be a directory that no other server uses"):
        create_app(Models(), ServerSettings(files_dir=str(tmp_path)))
    asyncio.run(app.state.batches.aclose())
    asyncio.run(create_app(Models(), ServerSettings(files_dir=str(tmp_path))).state.batches.aclose())
    (tmp_path / "file").touch()
    with pytest.raises(InvalidParameterError, match="files_dir must be a writable directory"):
        create_app(Models(), ServerSettings(files_dir=str(tmp_path / "file")))
