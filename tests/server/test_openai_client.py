"""OpenAI's own client against a live server with the embedded model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from ferrule import LLM, SamplingParams
from server.live import Live

pytestmark = pytest.mark.native

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
OBJECT = {"type": "object", "additionalProperties": False}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": name, "parameters": {**OBJECT, **parameters}}}
    for name, parameters in [
        ("weather", {"properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}),
        ("time", {"properties": {}}),
    ]
]


@pytest.fixture(scope="module")
def client(tiny: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").owned_by == "ferrule"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("none")
    assert caught.value.code == "model_not_found"


def test_chat_equals_library_output(client: openai.OpenAI, solo: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=12)
    expected = solo.chat([dict(message) for message in MESSAGES], SamplingParams(temperature=0, max_tokens=12))[0]
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_concatenated_chat_stream_equals_whole_response(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, max_tokens=30, n=2, temperature=2)
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        seed=3,
        max_tokens=30,
        n=2,
        temperature=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, ends, usage = ["", ""], ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1]
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_logprobs_match_generated_tokens(client: openai.OpenAI, solo: LLM) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    text = answer.choices[0].message.content or ""
    assert "".join(token.token for token in found.content).startswith(text)
    for token in found.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob
        assert bytes(token.bytes or ()).decode() == token.token
    expected = solo.chat(
        [dict(message) for message in MESSAGES], SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    )
    logprobs = expected[0].outputs[0].logprobs or []
    assert [token.logprob for token in found.content] == [next(iter(each.values())).logprob for each in logprobs]


def test_stop_and_logit_bias(client: openai.OpenAI, solo: LLM) -> None:
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=12)
    text = plain.choices[0].message.content or ""
    stop = text[4:7]
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, stop=[stop, "never"]
    )
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    (token,) = solo.tokenize("!", add_special_tokens=False)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=3, logit_bias={str(token): 100}
    )
    assert answer.choices[0].message.content == "!!!"


def test_json_schema_is_enforced(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
        extra_body={"structured_outputs": None},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert found.keys() == {"city", "large"}
    assert isinstance(found["large"], bool)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_tool_choice_forces_tool_call(client: openai.OpenAI, choice: object, names: set[str], stream: bool) -> None:
    fields: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    if stream:
        ids, called, arguments, ends = set[str](), "", "", set[str | None]()
        for chunk in client.chat.completions.create(model="tiny", **fields, seed=2, stream=True):
            ends.add(chunk.choices[0].finish_reason)
            assert not chunk.choices[0].delta.content
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.index == 0
                assert call.function is not None
                ids |= {call.id} - {None}
                called += call.function.name or ""
                arguments += call.function.arguments or ""
        assert len(ids) == 1
        assert ends == {None, "tool_calls"}
    else:
        answer = client.chat.completions.create(model="tiny", **fields, seed=2).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls or []
        called, arguments = call.function.name, call.function.arguments
    assert called in names
    assert json.loads(arguments).keys() == ({"city"} if called == "weather" else set())


def test_completions_equal_library_output(client: openai.OpenAI, solo: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time,"]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    expected = solo.generate(prompts, params)
    answer = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=3, echo=True, logprobs=2)
    for choice, output in zip(answer.choices, expected, strict=True):
        assert choice.text == f"{output.prompt}{output.outputs[0].text}"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
        known = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
        assert choice.logprobs.token_logprobs == [
            None if each is None else next(iter(each.values())).logprob for each in known
        ]


@pytest.mark.parametrize("prompt", ["The capital of France is", [459, 377], ["Once", "The capital"]])
def test_concatenated_completion_stream_equals_whole_response(client: openai.OpenAI, prompt: str | list[str]) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "seed": 5,
        "max_tokens": 9,
        "n": 2,
        "echo": True,
        "logprobs": 1,
    }
    whole = client.completions.create(**fields)
    texts, tokens = [""] * len(whole.choices), [list[str]() for _ in whole.choices]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_best_of_equals_library_output(client: openai.OpenAI, solo: LLM, n: int, stream: bool) -> None:
    params = SamplingParams(max_tokens=9, seed=5, n=n, best_of=4)
    expected = solo.generate("Once upon a time", params)[0]
    fields: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 9, "seed": 5}
    answer: Any = client.completions.create(**fields, n=n, best_of=4, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    assert [(choice.index, choice.text) for choice in choices] == [
        (completion.index, completion.text) for completion in expected.outputs
    ]


def test_echo_with_zero_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="The capital", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "The capital"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_embeddings_equal_library_output(client: openai.OpenAI, solo: LLM) -> None:
    texts = ["The capital of France", "Once upon a time"]
    expected = [output.outputs.embedding for output in solo.embed(texts)]
    found = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    np.testing.assert_array_equal(np.array([each.embedding for each in found.data], np.float32), expected)
    found = client.embeddings.create(model="tiny", input=texts, encoding_format="float", dimensions=8)
    assert [len(each.embedding) for each in found.data] == [8, 8]
    assert found.usage.prompt_tokens > 4


def test_base64_is_little_endian_float32(tiny: Live, solo: LLM) -> None:
    body = {"input": "Paris", "encoding_format": "base64"}
    (found,) = tiny.request("/v1/embeddings", body).json["data"]
    vector = np.frombuffer(base64.b64decode(found["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, solo.embed("Paris")[0].outputs.embedding)


ERRORS: list[tuple[dict[str, object], str, str]] = [
    ({"model": "none"}, "model", "model_not_found"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"n": 1000}, "n", "invalid_value"),
    ({"frequency_penalty": "high"}, "frequency_penalty", "invalid_type"),
    ({"extra_body": {"audio": {}}}, "audio", "unsupported_parameter"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"logit_bias": {"4096": 1}}, "logit_bias", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), ERRORS)
def test_invalid_field_is_named_in_error(
    client: openai.OpenAI, fields: dict[str, object], param: str, code: str
) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, **fields}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**given)
    assert caught.value.status_code == (404 if code == "model_not_found" else 400)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert param.split(".", maxsplit=1)[0] in caught.value.message


def test_prediction_does_not_change_output(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=20)
    text = plain.choices[0].message.content or ""
    again = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=20,
        prediction={"type": "content", "content": text},
    )
    assert again.choices[0].message.content == text
    assert again.usage is not None
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    # How much of it is drafted depends on what verifying costs on this machine.
    assert again.usage.completion_tokens_details is not None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "param"),
    [([[1], [2, 4096]], "prompt[1][1]"), (["a", "b", ""], "prompt[2]"), ([[5], [5] * 3000], "prompt[1]")],
)
def test_error_param_contains_prompt_index(tiny: Live, prompt: Any, param: str, stream: bool) -> None:
    found = tiny.complete(prompt, stream=stream)
    assert (found.status, found.error["param"]) == (400, param)


def test_client_does_not_retry_request_failed(tiny: Live) -> None:
    forbidden: dict[str, Any] = {"structured_outputs": {"choice": ["ab"]}, "allowed_token_ids": [5]}

    def failed() -> int:
        return tiny.llm.metrics().requests_finished["error"]

    before = failed()
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client:
        with pytest.raises(openai.UnprocessableEntityError, match="every one is forbidden") as caught:
            client.completions.create(model="tiny", prompt="a", extra_body=forbidden)
        assert caught.value.code == "request_failed"
    assert failed() == before + 1


def test_continue_final_message(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [*MESSAGES, {"role": "assistant", "content": "The capital of"}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=4,
        extra_body={"continue_final_message": True, "top_k": 5, "min_p": 0.1, "return_token_ids": True},
    )
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.content.startswith(" ")
    assert answer.choices[0].model_extra is not None
    assert len(answer.choices[0].model_extra["token_ids"]) == 4
