"""Servers that answer requests with images: the same text in every protocol, and nothing but the request is read."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from ferrule import LLM, AsyncLLM, SamplingParams
from ferrule._cli import main
from ferrule._vision.model import VisionModel
from ferrule.server import ServerSettings
from server.live import Answer, Live, events, serving

pytestmark = pytest.mark.native

MODEL = Path(__file__).parents[1] / "golden" / "vision" / "smolvlm"
FILE = MODEL / "image1.png"
ENCODED = base64.b64encode(FILE.read_bytes()).decode()
URL = f"data:image/png;base64,{ENCODED}"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Chat template in the manner of SmolVLM."""
WORDS = "What is this?"
PART = {"type": "image_url", "image_url": {"url": URL}}
QUESTION = {"role": "user", "content": [PART, {"type": "text", "text": WORDS}]}
INPUT = [
    {
        "role": "user",
        "content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": WORDS}],
    }
]
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}}
BLOCKS = {"role": "user", "content": [BLOCK, {"type": "text", "text": WORDS}]}
LIMITS = {"max_tokens": 12, "temperature": 0}
OPTIONS = {"num_predict": 12, "temperature": 0}


def load() -> AsyncLLM:
    return AsyncLLM(MODEL, quantization="f32")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Generator[Live]:
    settings = ServerSettings(
        chat_template=TEMPLATE, ollama=True, responses_db=str(tmp_path_factory.mktemp("server") / "responses.db")
    )
    with serving(settings, names=("vlm",), llm=load) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> tuple[str, int]:
    """Text of an answer, and the number of tokens of its prompt."""
    with LLM(MODEL, quantization="f32") as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        output = llm.chat(cast("Any", [QUESTION]), params, chat_template=TEMPLATE)[0]
        return output.outputs[0].text, len(output.prompt_token_ids)


def lines(answer: Answer) -> list[Any]:
    return [json.loads(line) for line in answer.body.splitlines()]


def test_chat_completions(live: Live, expected: tuple[str, int]) -> None:
    body = {"messages": [QUESTION], **LIMITS}
    whole = live.request("/v1/chat/completions", body).json
    assert (whole["choices"][0]["message"]["content"], whole["usage"]["prompt_tokens"]) == expected
    stream = live.request("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = list(events(stream.body))
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert (text, chunks[-1]["usage"]["prompt_tokens"]) == expected


def test_responses(live: Live, expected: tuple[str, int]) -> None:
    first = live.request("/v1/responses", {"input": INPUT, "max_output_tokens": 12, "temperature": 0}).json
    assert (first["output"][0]["content"][0]["text"], first["usage"]["input_tokens"]) == expected
    # The next request reads the image again from the stored one.
    more = {"input": "Round?", "max_output_tokens": 4, "temperature": 0, "previous_response_id": first["id"]}
    second = live.request("/v1/responses", more).json
    assert second["usage"]["input_tokens"] > expected[1]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= 16
    stored = live.request(f"/v1/responses/{first['id']}/input_items").json["data"][0]["content"][0]
    assert stored["image_url"] == URL


def test_messages_of_anthropic(live: Live, expected: tuple[str, int]) -> None:
    answer = live.request("/v1/messages", {"model": "vlm", "messages": [BLOCKS], **LIMITS}).json
    usage = answer["usage"]
    tokens = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert (answer["content"][0]["text"], tokens) == expected


def test_ollama(live: Live, expected: tuple[str, int]) -> None:
    message = {"role": "user", "content": WORDS, "images": [ENCODED]}
    chat = {"model": "vlm", "messages": [message], "options": OPTIONS}
    generate = {"model": "vlm", "prompt": WORDS, "images": [ENCODED], "options": OPTIONS}
    whole = live.request("/api/chat", {**chat, "stream": False}).json
    assert (whole["message"]["content"], whole["prompt_eval_count"]) == expected
    assert "".join(line["message"]["content"] for line in lines(live.request("/api/chat", chat))) == expected[0]
    whole = live.request("/api/generate", {**generate, "stream": False}).json
    assert (whole["response"], whole["prompt_eval_count"]) == expected
    assert "".join(line["response"] for line in lines(live.request("/api/generate", generate))) == expected[0]


def test_prompts_are_counted_without_features(
    live: Live, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("features were computed")

    monkeypatch.setattr(VisionModel, "features", refuse)
    for path, body, field in (
        ("/v1/chat/completions/input_tokens", {"messages": [QUESTION]}, "input_tokens"),
        ("/v1/responses/input_tokens", {"input": INPUT}, "input_tokens"),
        ("/v1/messages/count_tokens", {"model": "vlm", "messages": [BLOCKS]}, "input_tokens"),
        ("/tokenize", {"messages": [QUESTION]}, "count"),
    ):
        assert live.request(path, body).json[field] == expected[1], path
    rendered = live.request("/apply-template", {"messages": [QUESTION]}).json["prompt"]
    assert rendered.count("<image>") == 4


def image_url(url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


SECRETS: list[tuple[dict[str, Any], str]] = [
    (image_url({"url": "file:///etc/passwd"}), ".image_url.url"),
    (image_url({"url": "/etc/passwd"}), ".image_url.url"),
    (image_url({"url": "http://127.0.0.1:1/a.png"}), ".image_url.url"),
    (image_url({"url": URL.replace("data:image/png", "data:text/html")}), ".image_url.url"),
    (image_url("https://example.com/a.png"), ".image_url"),
    (image_url({"path": "/etc/passwd"}), ".image_url.url"),
    (image_url(None) | {"path": "/etc/passwd"}, ".image_url"),
    ({"type": "image", "path": "/etc/passwd"}, ".type"),
    ({"type": "image", "url": "file:///etc/passwd"}, ".type"),
    ({"type": "image", "image": str(FILE)}, ".type"),
    ({"type": "image_pil", "image_pil": str(FILE)}, ".type"),
    ({"type": "input_image", "image_url": URL}, ".type"),
]
"""Parts of messages that name files or URLs, and the fields that errors name."""


@pytest.mark.parametrize(("part", "field"), SECRETS)
def test_chat_completions_read_neither_files_nor_urls(live: Live, part: dict[str, Any], field: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": WORDS}, part]}]
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/tokenize", "/apply-template"):
        answer = live.request(path, {"messages": messages})
        assert answer.status == 400, path
        assert f"messages[0].content[1]{field}" in answer.error["message"], path
        assert "root:" not in answer.body.decode()


def test_fields_beside_an_image_are_not_read(live: Live, expected: tuple[str, int]) -> None:
    part = {**PART, "path": "/etc/passwd", "image": "/etc/passwd", "url": "http://127.0.0.1:1"}
    text = {"type": "text", "text": WORDS, "path": "/etc/passwd", "image_url": "file:///etc/passwd"}
    message = {"role": "user", "content": [part, text], "images": ["/etc/passwd"], "image": "/etc/passwd"}
    answer = live.request("/v1/chat/completions", {"messages": [message], **LIMITS})
    assert answer.json["choices"][0]["message"]["content"] == expected[0]
    extra = {"multi_modal_data": {"image": "/etc/passwd"}, "documents": [{"type": "image", "path": "/etc/passwd"}]}
    answer = live.request("/v1/chat/completions", {"messages": [message], **LIMITS, **extra})
    assert answer.json["usage"]["prompt_tokens"] == expected[1]
    for prompt in ({"prompt": "a", "multi_modal_data": {"image": "/etc/passwd"}}, [{"image": "/etc/passwd"}]):
        assert live.request("/v1/completions", {"prompt": prompt}).status == 400


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "image_url"),
        ({"type": "input_image", "image_url": URL, "file_id": "file-1"}, "file_id"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, "image_url"),
        ({"type": "input_image", "image_url": "http://127.0.0.1:1/a.png"}, "image_url"),
        ({"type": "input_image", "image_url": {"url": URL}}, "image_url"),
        ({"type": "image", "path": "/etc/passwd"}, "type"),
        ({"type": "input_file", "file_url": "file:///etc/passwd"}, "type"),
    ],
)
def test_responses_read_neither_files_nor_urls(live: Live, part: dict[str, Any], field: str) -> None:
    answer = live.request("/v1/responses", {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1})
    assert answer.status == 400
    assert f"input[0].content[0].{field}" in answer.error["message"]


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"type": "url", "url": "file:///etc/passwd"}, "source.url"),
        ({"type": "url", "url": "https://example.com/a.png"}, "source.url"),
        ({"type": "base64", "media_type": "image/png", "data": "/etc/passwd"}, "source.data"),
        ({"type": "file", "file_id": "file-1"}, "source"),
    ],
)
def test_messages_read_neither_files_nor_urls(live: Live, source: dict[str, Any], field: str) -> None:
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        fields = LIMITS if path == "/v1/messages" else {}
        answer = live.request(path, {"model": "vlm", "messages": [message], **fields})
        assert answer.status == 400
        assert f"messages[0].content[0].{field}" in answer.error["message"]


@pytest.mark.parametrize("image", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/a.png"])
def test_ollama_reads_neither_files_nor_urls(live: Live, image: str) -> None:
    message = {"role": "user", "content": WORDS, "images": [image]}
    for path, fields, field in (
        ("/api/chat", {"messages": [message]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": WORDS, "images": [image]}, "images[0]"),
    ):
        answer = live.request(path, {"model": "vlm", **fields})
        assert answer.status == 400
        assert answer.json["error"].startswith(field)


def test_prompts_with_images_are_not_truncated(live: Live) -> None:
    for kept in (-1, 8):
        answer = live.chat(messages=[QUESTION], truncate_prompt_tokens=kept)
        assert answer.status == 400
        assert answer.error["param"] == "truncate_prompt_tokens"


def test_run_batch(tmp_path: Path, expected: tuple[str, int]) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    local = {"role": "user", "content": [{"type": "image", "path": str(FILE)}, {"type": "text", "text": WORDS}]}
    requests = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [message], **LIMITS},
        }
        for index, message in enumerate((QUESTION, local))
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    assert main(["run-batch", str(model), str(source), str(target), "--quantization", "f32", "--quiet"]) == 1
    answered, refused = (json.loads(line)["response"] for line in target.read_text().splitlines())
    body = answered["body"]
    assert (body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]) == expected
    assert refused["status_code"] == 400
    assert "messages[0].content[0].type" in refused["body"]["error"]["message"]
