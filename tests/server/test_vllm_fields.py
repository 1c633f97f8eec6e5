"""Fields of vLLM's server: beam search, truncation of prompts, and the echo of a chat."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ferrule import LLM, BeamSearchParams
from ferrule.server.openai import chat, completions
from ferrule.server.openai.completion_fields import prompt_logprobs
from server.live import Live, events

pytestmark = pytest.mark.native
PROMPT = "The capital of France is"
TURNS = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "The capital"}]
CONTINUED = {"messages": TURNS, "continue_final_message": True, "temperature": 0, "max_tokens": 4}


def searched(solo: LLM, width: int, **more: Any) -> list[str]:
    found = solo.beam_search(PROMPT, BeamSearchParams(beam_width=width, max_tokens=5, **more))[0]
    return [each.text for each in found.sequences]


def test_completions_of_beam_search_are_those_of_the_library(tiny: Live, solo: LLM) -> None:
    answer = tiny.complete(PROMPT, use_beam_search=True, n=3, max_tokens=5, temperature=0).json
    assert [choice["text"] for choice in answer["choices"]] == searched(solo, 3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] >= 3


def test_best_of_is_the_number_of_beams(tiny: Live, solo: LLM) -> None:
    given: dict[str, Any] = {"length_penalty": -2.0, "early_stopping": True}
    answer = tiny.complete(PROMPT, use_beam_search=True, n=1, best_of=4, max_tokens=5, **given).json
    assert [choice["text"] for choice in answer["choices"]] == searched(solo, 4, **given)[:1]


def test_stream_of_a_beam_search_has_one_event_per_choice(tiny: Live, solo: LLM) -> None:
    answer = tiny.complete(PROMPT, use_beam_search=True, n=2, max_tokens=5, stream=True)
    assert [chunk["choices"][0]["text"] for chunk in events(answer.body)] == searched(solo, 2)


def test_beams_of_a_chat_are_messages(tiny: Live) -> None:
    answer = tiny.chat(use_beam_search=True, n=2, max_tokens=4).json
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(contents)) == 2
    assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "stop": "a"}, "stop"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": True, "n": 200}, "n"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_fields_that_do_not_fit_a_beam_search_are_refused(tiny: Live, fields: dict[str, Any], param: str) -> None:
    answer = tiny.complete(PROMPT, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_neutral_beam_fields_are_accepted_without_a_beam_search(tiny: Live) -> None:
    fields: dict[str, Any] = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    assert tiny.complete(PROMPT, max_tokens=1, **fields).status == 200


@pytest.mark.parametrize("kept", [1, 3, 100])
def test_truncation_keeps_the_last_tokens(tiny: Live, kept: int) -> None:
    ids = tiny.llm.tokenize(PROMPT)
    fields: dict[str, Any] = {"truncate_prompt_tokens": kept, "return_token_ids": True, "max_tokens": 3}
    by_text = tiny.complete(PROMPT, temperature=0, **fields).json["choices"][0]
    by_ids = tiny.complete(ids[-kept:], temperature=0, max_tokens=3).json["choices"][0]
    assert by_text["prompt_token_ids"] == ids[-kept:]
    assert by_text["text"] == by_ids["text"]
    chat = tiny.chat(**fields).json
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"] <= kept


def test_truncation_to_the_context_leaves_room_for_the_output(tiny: Live) -> None:
    limit = tiny.llm.info()["max_model_len"]
    long = [5] * (limit + 10)
    assert tiny.complete(long, max_tokens=4).status == 400
    answer = tiny.complete(long, max_tokens=4, truncate_prompt_tokens=-1, ignore_eos=True).json
    assert answer["usage"]["prompt_tokens"] == limit - 4
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("kept", [0, -2, 10**6])
def test_invalid_truncation_is_refused(tiny: Live, kept: int) -> None:
    for answer in (tiny.complete(truncate_prompt_tokens=kept), tiny.chat(truncate_prompt_tokens=kept)):
        assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")


def test_truncation_tokenizes_no_text_of_any_length(tiny: Live) -> None:
    answer = tiny.complete("word " * 300_000, truncate_prompt_tokens=4, max_tokens=1)
    assert (answer.status, answer.error["param"]) == (400, "prompt")


def test_truncation_is_refused_with_a_suffix(tiny: Live) -> None:
    answer = tiny.complete(suffix="b", truncate_prompt_tokens=1)
    assert (answer.status, answer.error["param"]) == (400, "suffix")


def test_echo_of_a_truncated_prompt_is_what_the_model_read(tiny: Live) -> None:
    ids = tiny.llm.tokenize(PROMPT)
    answer = tiny.complete(PROMPT, echo=True, max_tokens=0, truncate_prompt_tokens=2).json
    assert answer["choices"][0]["text"] == tiny.llm.detokenize(ids[-2:])


def test_chat_echo_begins_with_the_message_that_is_continued(tiny: Live) -> None:
    plain = tiny.request("/v1/chat/completions", CONTINUED).json["choices"][0]["message"]["content"]
    echoed = tiny.request("/v1/chat/completions", {**CONTINUED, "echo": True})
    assert echoed.json["choices"][0]["message"]["content"] == "The capital" + plain
    assert "prompt_logprobs" not in echoed.json
    stream = tiny.request("/v1/chat/completions", {**CONTINUED, "echo": True, "stream": True})
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in events(stream.body)]
    assert "".join(deltas) == "The capital" + plain


def test_chat_echo_without_an_answer_to_continue_adds_nothing(tiny: Live) -> None:
    plain, echoed = (tiny.chat(temperature=0, max_tokens=4, echo=echo).json for echo in (False, True))
    assert plain["choices"][0]["message"] == echoed["choices"][0]["message"]


def test_chat_echo_with_logprobs_reports_those_of_the_prompt(tiny: Live) -> None:
    answer = tiny.request("/v1/chat/completions", {**CONTINUED, "echo": True, "logprobs": True, "top_logprobs": 2}).json
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["prompt_logprobs"][1]) >= 2


@pytest.mark.parametrize(
    ("path", "stream"), [("/v1/completions", False), ("/v1/completions", True), ("/v1/chat/completions", False)]
)
def test_many_log_probabilities_are_written_in_a_worker_thread(
    path: str, stream: bool, tiny: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON of a long prompt's takes a second, in which the streams of other requests would stand still."""
    threads: list[str] = []

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prompt_logprobs(*given)

    for module in (chat, completions):
        monkeypatch.setattr(module, "prompt_logprobs", noted)

    def found(words: int) -> Any:
        text = "word " * words
        fields: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 20, "stream": stream}
        if path == "/v1/chat/completions":
            return tiny.request(path, {**fields, "messages": [{"role": "user", "content": text}]}).json
        answer = tiny.request(path, {**fields, "prompt": text})
        return (next(events(answer.body)) if stream else answer.json)["choices"][0]

    few, many = (found(words)["prompt_logprobs"] for words in (2, 200))
    assert few[:2] == many[:2]
    assert len(many) > 200
    assert all(len(each) >= 20 for each in many[1:])
    assert [thread.startswith("ferrule-worker") for thread in threads] == [False, True]
