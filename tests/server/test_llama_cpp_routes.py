"""llama.cpp's own routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ferrule import LLM
from ferrule.server import ServerSettings
from ferrule.server.early_end import GenerationTime
from ferrule.server.errors import ApiError
from ferrule.server.llama_cpp import error_body
from ferrule.server.llama_cpp.requests import RANDOM_SEED
from ferrule.server.llama_cpp.slots import slots_of
from server.live import Answer, Live, events, serving, until

pytestmark = pytest.mark.native
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "n_predict": 5}


def complete(live: Live, **fields: Any) -> Answer:
    return live.request("/completion", {**GREEDY, **fields})


def parts(answer: Answer) -> list[Any]:
    return [json.loads(each.removeprefix(b"data: ")) for each in answer.body.split(b"\n\n") if each]


def test_completion_equals_that_of_openai(tiny: Live) -> None:
    found = complete(tiny, ignore_eos=True).json
    expected = tiny.complete(PROMPT, temperature=0, max_tokens=5, ignore_eos=True).json["choices"][0]
    assert found["content"] == expected["text"]
    assert (found["stop"], found["stop_type"], found["tokens"]) == (True, "limit", [])
    assert found["has_new_line"] is ("\n" in expected["text"])
    timings, ids = found["timings"], tiny.llm.tokenize(PROMPT)
    assert timings["prompt_n"] + timings["cache_n"] == found["tokens_evaluated"] == len(ids)
    assert timings["predicted_n"] == found["tokens_predicted"] == 5
    assert found["prompt"] == tiny.llm.detokenize(ids, skip_special_tokens=False)
    assert found["generation_settings"]["n_predict"] == 5
    assert found["generation_settings"]["temperature"] == 0


def test_reasons_to_stop(tiny: Live) -> None:
    ended = complete(tiny, n_predict=40).json
    assert (ended["stop_type"], ended["stopping_word"]) == ("eos", "")
    stopped = complete(tiny, stop=["Paris"]).json
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "Paris")


def test_stream_has_the_parts_of_the_whole_answer(tiny: Live) -> None:
    whole = complete(tiny, return_tokens=True).json
    *events, last = parts(complete(tiny, stream=True))
    assert "".join(each["content"] for each in events) == whole["content"]
    assert [token for each in events for token in each["tokens"]] == whole["tokens"]
    assert [each["stop"] for each in events] == [False] * len(events)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", whole["stop_type"])
    assert last["timings"]["predicted_n"] == whole["tokens_predicted"]


def test_several_prompts_in_all_forms(tiny: Live) -> None:
    ids = tiny.llm.tokenize(PROMPT)
    found = complete(tiny, prompt=[PROMPT, ids, {"prompt_string": PROMPT}, [*ids[:-1], ids[-1]]]).json
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    assert len({each["content"] for each in found}) == 1
    mixed = complete(tiny, prompt=[1, 5, PROMPT, 6], response_fields=["tokens_evaluated"]).json
    assert mixed == {"tokens_evaluated": 3 + len(tiny.llm.tokenize(PROMPT, add_special_tokens=False))}
    streamed = parts(complete(tiny, prompt=[PROMPT, PROMPT], stream=True))
    assert sorted(each["index"] for each in streamed if each["stop"]) == [0, 1]


def test_response_fields_select_parts_of_the_answer(tiny: Live) -> None:
    found = complete(tiny, response_fields=["content", "generation_settings/n_predict", "none/a"]).json
    assert found.keys() == {"content", "generation_settings/n_predict"}


def test_n_probs_reports_alternatives(tiny: Live) -> None:
    found = complete(tiny, n_probs=3, ignore_eos=True).json["completion_probabilities"]
    assert [len(each["top_logprobs"]) for each in found] == [3] * 5
    assert found[0]["id"] == found[0]["top_logprobs"][0]["id"]
    assert found[0]["logprob"] <= 0
    streamed = parts(complete(tiny, n_probs=3, ignore_eos=True, stream=True))
    assert [one["id"] for each in streamed for one in each.get("completion_probabilities", ())] == [
        each["id"] for each in found
    ]


def test_events_with_probabilities_have_one_token(tiny: Live) -> None:
    *streamed, last = parts(complete(tiny, n_predict=20, n_probs=2, ignore_eos=True, stream=True))
    assert [len(each["tokens"]) for each in streamed] == [1] * 20
    assert [len(each["completion_probabilities"]) for each in streamed] == [1] * 20
    whole = complete(tiny, n_predict=20, ignore_eos=True).json["content"]
    assert "".join(each["content"] for each in streamed) + last["content"] == whole


def test_probabilities_after_all_samplers(tiny: Live) -> None:
    asked: dict[str, Any] = {"n_probs": 3, "post_sampling_probs": True, "ignore_eos": True}
    for each in complete(tiny, **asked).json["completion_probabilities"]:
        assert each.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        assert (each["prob"], [one["id"] for one in each["top_probs"]]) == (1, [each["id"]])
    random: dict[str, Any] = {**asked, "temperature": 1.5, "seed": 3, "samplers": ["top_k", "temperature"]}
    for each in complete(tiny, **random, top_k=2).json["completion_probabilities"]:
        first, second = each["top_probs"]
        assert first.keys() == {"id", "token", "bytes", "prob"}
        assert each["id"] in (first["id"], second["id"])
        assert 1 > first["prob"] >= second["prob"] > 0
        assert first["prob"] + second["prob"] == pytest.approx(1)
    *streamed, _ = parts(complete(tiny, **random, top_k=0, stream=True))
    for (each,) in (part["completion_probabilities"] for part in streamed):
        assert len(each["top_probs"]) == 3
        assert 0 < sum(one["prob"] for one in each["top_probs"]) <= 1 + 1e-9


def test_a_line_with_less_indentation_ends_the_output(tiny: Live) -> None:
    (line,) = (token for token in range(300) if tiny.llm.detokenize([token]) == "\n")
    asked: dict[str, Any] = {"n_predict": 30, "allowed_token_ids": [line], "ignore_eos": True}
    assert complete(tiny, **asked).json["content"] == "\n" * 30
    found = complete(tiny, **asked, n_indent=1, return_tokens=True).json
    assert (found["content"], found["stop_type"], found["has_new_line"]) == ("\n", "limit", True)
    assert found["tokens"] == [line] * found["tokens_predicted"]
    *streamed, last = parts(complete(tiny, **asked, n_indent=1, stream=True))
    assert "".join(each["content"] for each in streamed) == "\n"
    assert (last["stop"], last["stop_type"]) == (True, "limit")
    whole = complete(tiny)
    assert complete(tiny, n_indent=9).json["content"] == whole.json["content"]  # it has one line


def test_the_limit_of_the_generation_time_is_that_of_the_request(tiny: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def condition(seconds: float) -> GenerationTime:
        limits.append(seconds)
        return GenerationTime(seconds)

    monkeypatch.setattr("ferrule.server.llama_cpp.requests.GenerationTime", condition)
    for limit in (-1, 0, 90_000):
        assert complete(tiny, t_max_predict_ms=limit).json["content"] == complete(tiny).json["content"]
    assert limits == [90]


def test_the_progress_of_a_prompt_is_streamed(tiny: Live) -> None:
    asked: dict[str, Any] = {"prompt": list(range(5, 205)) * 4, "stream": True, "timings_per_token": True}
    found = parts(complete(tiny, **asked, return_progress=True))
    events = [each for each in found if "prompt_progress" in each]
    assert found[: len(events)] == events
    assert [(each["content"], each["tokens"], each["stop"]) for each in events] == [("", [], False)] * len(events)
    check_progress([each["prompt_progress"] for each in events], 800)
    begun = events[0]["timings"]
    assert (begun["prompt_n"], begun["prompt_ms"], begun["predicted_n"], begun["predicted_ms"]) == (0, 0, 0, 0)
    assert events[-1]["timings"]["prompt_n"] == 800 - found[-1]["tokens_cached"]
    assert all("prompt_progress" not in each for each in parts(complete(tiny, **asked)))


def check_progress(found: list[dict[str, Any]], total: int) -> None:
    assert {each["total"] for each in found} == {total}
    assert len({each["cache"] for each in found}) == 1
    processed, times = ([each[name] for each in found] for name in ("processed", "time_ms"))
    assert (processed[0], processed[-1], times[0]) == (found[0]["cache"], total, 0)
    assert processed == sorted(set(processed))
    assert times == sorted(times)


def test_streams_of_other_routes_report_the_progress_of_the_prompt(tiny: Live) -> None:
    asked: dict[str, Any] = {"stream": True, "return_progress": True}
    text = "a b c d " * 50
    for answer in (tiny.complete(text, **asked), tiny.chat(messages=[{"role": "user", "content": text}], **asked)):
        chunks = list(events(answer.body))
        found = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        check_progress(found, found[0]["total"])
        assert all("prompt_progress" in chunk for chunk in chunks[: len(found)])
    lines = tiny.request("/v1/responses", {"model": "tiny", "input": text, **asked}).body.split(b"\n")
    sent = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    found = [each["prompt_progress"] for each in sent if "prompt_progress" in each]
    check_progress(found, sent[-1]["response"]["usage"]["input_tokens"])
    assert {each["type"] for each in sent if "prompt_progress" in each} == {"response.in_progress"}
    assert [each["sequence_number"] for each in sent] == list(range(len(sent)))


def test_an_answer_that_fills_the_context_is_truncated(tiny: Live) -> None:
    length = tiny.llm.info()["max_model_len"]
    prompt = [5] * (length - 3)
    assert complete(tiny, prompt=prompt, n_predict=-1, ignore_eos=True).json["truncated"] is True
    assert complete(tiny, prompt=prompt, n_predict=2, ignore_eos=True).json["truncated"] is False
    assert complete(tiny).json["truncated"] is False


def test_settings_of_the_answer(tiny: Live) -> None:
    found = complete(tiny, ignore_eos=True).json["generation_settings"]
    assert found["seed"] == RANDOM_SEED
    assert found["logit_bias"] == [{"bias": None, "token": token} for token in tiny.llm.info()["eos_token_ids"]]
    found = complete(tiny, seed=7, adaptive_target=-1.0).json["generation_settings"]
    assert (found["seed"], found["logit_bias"], found["adaptive_target"]) == (7, [], -1)


def test_slots_show_the_sequences_in_use(tiny: Live) -> None:
    complete(tiny)
    until(lambda: not tiny.llm.metrics().running)
    found = tiny.request("/slots?fail_on_no_slot=1").json
    info = tiny.llm.info()
    free = {"n_ctx": info["max_model_len"], "speculative": False, "is_processing": False}
    assert found == [{"id": index, **free} for index in range(info["max_num_seqs"])]


def test_slots_in_use() -> None:
    info = {"max_num_seqs": 3, "max_model_len": 64, "speculative_config": {"method": "ngram"}}
    found = slots_of(info, 2, free=True)
    assert [(each.id, each.is_processing) for each in found] == [(0, True), (1, True), (2, False)]
    assert (found[0].n_ctx, found[0].speculative) == (64, True)
    assert all(each.is_processing for each in slots_of(info, 3, free=False))
    with pytest.raises(ApiError) as caught:
        slots_of(info, 3, free=True)
    assert (caught.value.status_code, error_body(caught.value)["error"]["type"]) == (503, "unavailable_error")


def test_slots_have_no_actions(tiny: Live) -> None:
    for action in ("save", "restore", "erase"):
        answer = tiny.request(f"/slots/1?action={action}", {"filename": "a"})
        assert (answer.status, answer.error["type"], answer.error["param"]) == (501, "not_supported_error", "action")


def test_slots_can_be_disabled() -> None:
    with serving(ServerSettings(slots=False)) as live:
        answer = live.request("/slots")
        assert (answer.status, answer.error["type"]) == (501, "not_supported_error")


def test_no_output_where_none_is_asked(tiny: Live) -> None:
    found = complete(tiny, n_predict=0, return_tokens=True).json
    assert (found["content"], found["tokens"], found["tokens_predicted"]) == ("", [], 0)


@pytest.mark.parametrize("form", [lambda word: [[word, False]], lambda word: {word: False}, lambda word: {word: -100}])
def test_biases_of_texts(tiny: Live, form: Any) -> None:
    assert "Paris" in complete(tiny).json["content"]
    assert "Paris" not in complete(tiny, logit_bias=form(" Paris")).json["content"]


def test_biases_of_token_ids(tiny: Live) -> None:
    token = complete(tiny, return_tokens=True).json["tokens"][0]
    for bias in ([[token, False]], [[token, -100]], {str(token): -100}):
        assert token not in complete(tiny, logit_bias=bias, return_tokens=True).json["tokens"][:1]


def test_embedding_is_a_list_of_vectors(tiny: Live, solo: LLM) -> None:
    found = tiny.request("/embedding", {"content": [PROMPT, "a"]}).json
    expected = [each.outputs.embedding.tolist() for each in solo.embed([PROMPT, "a"], normalize=True)]
    for each, vector in zip(found, expected, strict=True):
        assert each["embedding"][0] == pytest.approx(vector)
    plain = tiny.request("/embedding", {"content": PROMPT, "embd_normalize": -1}).json[0]["embedding"][0]
    assert plain == pytest.approx(solo.embed([PROMPT], normalize=False)[0].outputs.embedding.tolist())


def test_props_describe_the_model(tiny: Live) -> None:
    found = tiny.request("/props").json
    assert found["default_generation_settings"]["n_ctx"] == tiny.llm.info()["max_model_len"]
    assert found["total_slots"] == tiny.llm.info()["max_num_seqs"]
    assert found["chat_template"] == tiny.llm.chat_templates["default"]
    assert found["default_generation_settings"]["params"]["n_predict"] == -1


def test_tokenize_and_detokenize_with_content(tiny: Live) -> None:
    ids = tiny.request("/tokenize", {"content": PROMPT}).json["tokens"]
    assert ids == tiny.llm.tokenize(PROMPT, add_special_tokens=False)
    special = tiny.request("/tokenize", {"content": PROMPT, "add_special": True}).json["tokens"]
    assert special == tiny.llm.tokenize(PROMPT)
    pieces = tiny.request("/tokenize", {"content": "é🤗", "with_pieces": True}).json["tokens"]
    spelled = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
    assert b"".join(spelled).decode().strip() == "é🤗"
    assert tiny.request("/detokenize", {"tokens": ids}).json["content"].strip() == PROMPT


def test_template_is_applied(tiny: Live) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    found = tiny.request("/apply-template", {"messages": messages}).json["prompt"]
    assert found == tiny.llm.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/completion", {"prompt": "a", "n_predict": -2}, "n_predict"),
        ("/completion", {"prompt": "a", "n": 2}, "n"),
        ("/completion", {"prompt": "a", "logit_bias": [["a", 101]]}, None),
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": "a", "n_indent": -1}, "n_indent"),
        ("/completion", {"prompt": "a", "adaptive_target": 0.5}, "adaptive_target"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["aaaa"]}}, "prompt.multimodal_data"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "a"}]}, "input_extra"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/embedding", {"content": "a", "embd_normalize": 1}, "embd_normalize"),
    ],
)
def test_errors_have_the_form_of_llama_cpp(tiny: Live, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = tiny.request(path, body)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (400, 400, "invalid_request_error")
    assert param is None or answer.error["param"] == param


def test_input_tokens_of_a_chat_are_those_of_the_answer(tiny: Live) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    expected = tiny.request("/v1/chat/completions", asked).json["usage"]["prompt_tokens"]
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert tiny.request(path, asked).json == {"input_tokens": expected}
