"""Ollama's own client against a live server with the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import ollama
import pytest

from conftest import TINY
from ferrule import LLM, SamplingParams
from ferrule.server import ServerSettings
from lora_files import random_adapter
from server.live import Live, serving

pytestmark = pytest.mark.native

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 12}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(ServerSettings(ollama=True), names=("tiny", "other")) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[ollama.Client]:
    with ollama.Client(live.url) as client:
        yield client


def test_chat_equals_library_output(client: ollama.Client, solo: LLM) -> None:
    expected = solo.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))[0]
    for name in ("tiny", "tiny:latest"):
        found = client.chat(name, MESSAGES, options=GREEDY, keep_alive="5m")
        assert found.message.content == expected.outputs[0].text
        assert (found.model, found.done, found.done_reason) == ("tiny", True, "stop")
        assert found.prompt_eval_count == len(expected.prompt_token_ids)
        assert found.eval_count == len(expected.outputs[0].token_ids)
        assert found.total_duration is not None
        assert found.eval_duration is not None
        assert found.total_duration >= found.eval_duration > 1000, "nanoseconds"


@pytest.mark.parametrize("predict", [3, 12])
def test_streams_equal_whole_response(client: ollama.Client, predict: int) -> None:
    options = {**GREEDY, "num_predict": predict}
    whole = client.chat("tiny", MESSAGES, options=options)
    *lines, last = client.chat("tiny", MESSAGES, options=options, stream=True)
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert not any(line.done for line in lines)
    assert (last.message.content, last.done, last.done_reason) == ("", True, whole.done_reason)
    assert whole.done_reason == ("length" if predict == 3 else "stop")
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    text = client.generate("tiny", MESSAGES[0]["content"], options=options)
    *parts, end = client.generate("tiny", MESSAGES[0]["content"], options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == text.response == whole.message.content
    assert end.done_reason == text.done_reason


def test_stream_is_ndjson(live: Live) -> None:
    found = live.request("/api/chat", {"model": "tiny", "messages": MESSAGES, "options": GREEDY})
    assert found.headers["content-type"].startswith("application/x-ndjson")
    assert found.body.endswith(b"}\n")
    lines = [json.loads(each) for each in found.body.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "total_duration" not in lines[0]


def test_raw_prompts_and_system_field(client: ollama.Client, solo: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    found = client.generate("tiny", "Once upon a", raw=True, options=GREEDY, logprobs=True, top_logprobs=2)
    assert found.response == solo.generate(["Once upon a"], params)[0].outputs[0].text
    assert found.logprobs is not None
    assert "".join(each.token for each in found.logprobs) == found.response
    assert {len(each.top_logprobs or ()) for each in found.logprobs} == {2}
    found = client.generate("tiny", "Hi", system="Be brief.", options=GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert found.response == solo.chat(messages, params)[0].outputs[0].text


def test_options_equal_sampling_params(client: ollama.Client, solo: LLM) -> None:
    options = {
        "temperature": 2.0,
        "seed": 7,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repeat_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_predict": 20,
        "stop": ["zzz"],
        "num_ctx": 2048,
    }
    params = SamplingParams(
        temperature=2.0,
        seed=7,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        typical_p=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        max_tokens=20,
        stop=["zzz"],
    )
    assert (
        client.chat("tiny", MESSAGES, options=options).message.content == solo.chat(MESSAGES, params)[0].outputs[0].text
    )
    mirostat: dict[str, Any] = {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "temperature": 1.0, "seed": 7}
    params = SamplingParams(**mirostat, max_tokens=20)
    found = client.chat("tiny", MESSAGES, options={**mirostat, "num_predict": 20})
    assert found.message.content == solo.chat(MESSAGES, params)[0].outputs[0].text
    assert client.chat("tiny", MESSAGES, options={"temperature": 0, "num_predict": -1}).done_reason == "stop"


def test_format_is_enforced(client: ollama.Client) -> None:
    found = client.chat("tiny", MESSAGES, format=SCHEMA, options={"temperature": 0})
    jsonschema.validate(json.loads(found.message.content or ""), SCHEMA)
    text = client.generate("tiny", "Hi", format=SCHEMA, options={"seed": 3})
    jsonschema.validate(json.loads(text.response or ""), SCHEMA)
    begun = client.generate("tiny", "Hi", format="json", options={"temperature": 0, "num_predict": 20})
    assert (begun.response or "").lstrip().startswith("{")


def test_model_descriptions(client: ollama.Client, live: Live) -> None:
    listed = client.list().models
    assert [each.model for each in listed] == ["tiny", "other"]
    assert listed[0].details is not None
    assert (listed[0].details.family, listed[0].details.quantization_level) == ("llama", "int8")
    assert listed[0].details.parameter_size == "5.8M"
    assert re.fullmatch("[0-9a-f]{64}", listed[0].digest or "")
    running = client.ps().models
    assert [(each.name, each.size, each.size_vram) for each in running] == [
        (each.model, each.size, 0) for each in listed
    ]
    assert running[0].context_length == 2048
    assert running[0].expires_at is not None
    assert running[0].expires_at > datetime.now(UTC) + timedelta(days=36500)
    assert [each.digest for each in running] == [listed[0].digest] * 2, "they are names of one model"
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template is not None
    assert "add_generation_prompt" in shown.template
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.modelinfo["general.basename"] == "tiny"
    version = live.request("/api/version").json["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12, 11), "log-probabilities"


@pytest.mark.parametrize(
    ("settings", "capabilities"),
    [
        ({"chat_template": "{{ messages[-1].content }}<think></think>"}, ["completion", "tools", "thinking"]),
        ({"tool_call_parser": None}, ["completion"]),
        ({"reasoning_parser": "qwen3"}, ["completion", "tools", "thinking"]),
    ],
)
def test_capabilities_follow_the_settings_of_the_server(settings: dict[str, Any], capabilities: list[str]) -> None:
    with serving(ServerSettings(ollama=True, **settings)) as live, ollama.Client(live.url) as client:
        shown = client.show("tiny")
    assert shown.capabilities == capabilities
    if "chat_template" in settings:
        assert shown.template == settings["chat_template"]


def test_digests_differ_between_adapters(tmp_path: Path) -> None:
    def digests(seed: int) -> dict[str, str]:
        folder = tmp_path / str(seed)
        random_adapter(folder / "mine", TINY, seed=seed)
        settings = ServerSettings(ollama=True, lora_dir=str(folder))
        with serving(settings) as live:
            load = {"lora_name": "mine", "lora_path": "mine"}
            assert live.request("/v1/load_lora_adapter", load).status == 200
            return {each["name"]: each["digest"] for each in live.request("/api/tags").json["models"]}

    first, second = digests(1), digests(2)
    assert first.keys() == {"tiny", "mine"}
    assert first["tiny"] == second["tiny"]
    assert len({first["tiny"], first["mine"], second["mine"]}) == 3


def test_embeddings(client: ollama.Client, solo: LLM) -> None:
    texts = ["The capital of France", "Once upon a time"]
    found = client.embed("tiny", texts)
    expected = [output.outputs.embedding for output in solo.embed(texts, normalize=True)]
    np.testing.assert_array_equal(np.array(found.embeddings, np.float32), expected)
    assert len(client.embed("tiny", "Hi", dimensions=8).embeddings[0]) == 8
    long = "word " * 5000
    assert client.embed("tiny", long, options={"num_ctx": 2048}).prompt_eval_count == 2048
    with pytest.raises(ollama.ResponseError, match="2048"):
        client.embed("tiny", long, truncate=False)


def test_embeddings_of_the_older_route(client: ollama.Client, solo: LLM) -> None:
    found = client.embeddings("tiny", "The capital of France", options={"num_ctx": 8192, "num_thread": 4})
    expected = solo.embed(["The capital of France"], normalize=False)[0].outputs.embedding
    np.testing.assert_array_equal(np.array(found.embedding, np.float32), expected)
    assert not np.isclose(np.linalg.norm(expected), 1)
    long = "word " * 5000
    assert len(client.embeddings("tiny", long).embedding) == len(expected)
    assert list(client.embeddings("tiny", "").embedding) == []


def test_options_about_loading_are_accepted(live: Live) -> None:
    options = {"num_ctx": 131072, "num_gpu": 99, "num_thread": 8, "num_batch": 512}
    nothing = dict.fromkeys(["num_gpu", "mirostat", "tfs_z", "repeat_last_n", "future_option"])
    for route, fields in (
        ("chat", {"messages": MESSAGES}),
        ("generate", {"prompt": "Hi"}),
        ("embed", {"input": "Hi"}),
        ("embeddings", {"prompt": "Hi"}),
    ):
        for given in (options, nothing):
            answer = live.request(f"/api/{route}", {"model": "tiny", "stream": False, "options": given, **fields})
            assert answer.status == 200, answer.body


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_bodies_are_json_whatever_their_content_type(live: Live, content_type: str) -> None:
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": False, "options": GREEDY}).encode()
    answer = live.request("/api/chat", body, headers={"Content-Type": content_type})
    assert answer.status == 200, answer.body
    assert answer.json["message"]["content"]
    assert live.request("/api/chat", b"{:", headers={"Content-Type": content_type}).status == 400


def test_empty_request_returns_done_reason_load(client: ollama.Client) -> None:
    assert client.chat("tiny", []).done_reason == "load"
    found = client.generate("tiny", keep_alive=0)
    assert (found.done, found.response, found.done_reason) == (True, "", "load")


@pytest.mark.parametrize("given", ["5m", "1h30m", "-1m", ".5s", "1.h", "100\u00b5s", "+2ms", "-1", "300", -1, 0, 0.5])
def test_durations_are_accepted(live: Live, given: float | str) -> None:
    answer = live.request("/api/generate", {"model": "tiny", "keep_alive": given, "stream": False})
    assert (answer.status, answer.json["done_reason"]) == (200, "load")


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ("chat", {"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    ("chat", {"options": {"num_predict": 0}}, "options.num_predict"),
    ("chat", {"options": {"stop": [""]}}, "options.stop[0]"),
    ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
    ("chat", {"format": "xml"}, "format"),
    ("chat", {"format": 3}, "format"),
    ("chat", {"think": True}, "think"),
    ("chat", {"think": "very"}, "think"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images[0]"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": "aGk="}]}, "messages[0].images"),
    ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role"),
    ("chat", {"keep_alive": "soon"}, "keep_alive"),
    ("chat", {"keep_alive": ""}, "keep_alive"),
    ("chat", {"keep_alive": []}, "keep_alive"),
    ("generate", {"keep_alive": "5m soon"}, "keep_alive"),
    ("embed", {"keep_alive": "5 minutes"}, "keep_alive"),
    ("embeddings", {"keep_alive": "5d"}, "keep_alive"),
    ("chat", {"shift": True}, "shift"),
    ("generate", {"images": ["aGk="]}, "images[0]"),
    ("generate", {"raw": True, "images": ["aGk="]}, "images"),
    ("generate", {"context": [1, 2]}, "context"),
    ("generate", {"template": "{{ .Prompt }}"}, "template"),
    ("generate", {"raw": True, "system": "x"}, "system"),
    ("generate", {"suffix": "x"}, "suffix"),
    ("embed", {"input": [1]}, "input[0]"),
    ("embed", {"input": [""] * 2049}, "input"),
    ("embed", {"options": {"temperature": 0.5}}, "options.temperature"),
    ("show", {"model": 3}, "model"),
]


@pytest.mark.parametrize(("route", "fields", "named"), ERRORS)
def test_invalid_field_is_named_in_error(live: Live, route: str, fields: dict[str, Any], named: str) -> None:
    required: dict[str, dict[str, Any]] = {
        "chat": {"messages": MESSAGES},
        "generate": {"prompt": "Hi"},
        "embed": {"input": "Hi"},
        "embeddings": {"prompt": "Hi"},
        "show": {},
    }
    answer = live.request(f"/api/{route}", {"model": "tiny", **required[route], **fields})
    assert answer.status == 400
    assert answer.json.keys() == {"error"}
    assert answer.json["error"].startswith(f"{named} ")


def test_unknown_model_returns_404(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("none:latest", MESSAGES)
    assert caught.value.status_code == 404
    assert "none" in caught.value.error


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda client: client.pull("tiny"), "POST '/api/pull'"),
        (lambda client: client.delete("tiny"), "DELETE '/api/delete'"),
        (lambda client: client.create("mine", from_="tiny"), "POST '/api/create'"),
    ],
)
def test_unsupported_route_returns_404(client: ollama.Client, ask: Callable[[ollama.Client], Any], named: str) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        ask(client)
    assert (caught.value.status_code, named in caught.value.error) == (404, True)
