"""llama.cpp's fields in requests of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ferrule.errors import InvalidParameterError
from ferrule.outputs import RequestMetrics, RequestOutput
from ferrule.server.openai.protocol.completions import CompletionRequest
from ferrule.server.schema.llama_cpp import SAMPLERS, sampling_values
from ferrule.server.schema.timings import timings
from server.live import Live, events

GBNF = 'root ::= ("red" | "green") "!"'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}


def values(**fields: Any) -> dict[str, Any]:
    return sampling_values(CompletionRequest(prompt="a", **fields))


def test_samplers_disable_the_parameters_of_all_others() -> None:
    found = values(samplers=["top_k", "temperature"])
    assert found["top_p"] == found["typical_p"] == found["repetition_penalty"] == 1
    assert found["dry_multiplier"] == found["min_p"] == found["xtc_probability"] == 0
    assert not found.keys() & {"top_k", "temperature"}
    assert values(samplers="kt") == found
    assert values(samplers=list(SAMPLERS)) == {}


@pytest.mark.parametrize(
    ("samplers", "field"),
    [(["temperature", "top_k"], "samplers"), (["top_k", "top_k"], "samplers"), (["top_k", "infill"], "samplers[1]")],
)
def test_samplers_in_another_order_are_refused(samplers: list[str], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        values(samplers=samplers)
    assert caught.value.field == field


def test_range_of_penalties() -> None:
    assert values(repeat_penalty=1.5, repeat_last_n=-1) == {"repetition_penalty": 1.5}
    assert values(repeat_penalty=1.5, repeat_last_n=0)["repetition_penalty"] == 1
    assert values(repeat_last_n=64) == {}
    for penalty in ({"repeat_penalty": 1.5}, {"presence_penalty": 0.5}):
        with pytest.raises(InvalidParameterError, match="repeat_last_n must be -1"):
            values(repeat_last_n=64, **penalty)


@pytest.mark.native
def test_repeat_penalty_is_the_repetition_penalty(tiny: Live) -> None:
    given: dict[str, Any] = {"prompt": "a b a b a b", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    own, other = (tiny.complete(**{name: 1.8}, **given).json for name in ("repeat_penalty", "repetition_penalty"))
    assert own["choices"][0]["text"] == other["choices"][0]["text"]
    assert own["choices"][0]["text"] != tiny.complete(**given).json["choices"][0]["text"]


@pytest.mark.native
def test_n_predict_limits_the_output(tiny: Live) -> None:
    assert tiny.complete(n_predict=3, ignore_eos=True).json["usage"]["completion_tokens"] == 3
    assert tiny.chat(n_predict=2).json["usage"]["completion_tokens"] == 2
    unlimited = tiny.complete([5] * 2000, n_predict=-1, ignore_eos=True).json["usage"]
    assert unlimited["total_tokens"] == tiny.llm.info()["max_model_len"]


@pytest.mark.native
def test_grammar_and_json_schema_constrain_the_output(tiny: Live) -> None:
    for ask in (tiny.chat, tiny.complete):
        answer = ask(grammar=GBNF, max_tokens=8, seed=1).json["choices"][0]
        assert answer.get("text", answer.get("message", {}).get("content")) in ("red!", "green!")
        answer = ask(json_schema=SCHEMA, max_tokens=30, seed=1).json["choices"][0]
        assert json.loads(answer.get("text") or answer["message"]["content"])["n"] <= 9
    answer = tiny.chat(response_format={"type": "json_object", "schema": SCHEMA}, max_tokens=30, seed=1).json
    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"n"}
    assert tiny.complete(grammar="", max_tokens=1).status == 200


@pytest.mark.native
def test_n_probs_reports_alternatives(tiny: Live) -> None:
    found = tiny.complete(n_probs=3, max_tokens=2, ignore_eos=True).json["choices"][0]["logprobs"]
    assert len(found["tokens"]) == 2
    assert len(found["top_logprobs"][0]) >= 3
    found = tiny.chat(n_probs=3, max_tokens=2, ignore_eos=True).json["choices"][0]["logprobs"]
    assert [len(each["top_logprobs"]) for each in found["content"]] == [3, 3]


def test_rates_are_zero_where_nothing_was_measured() -> None:
    metrics = RequestMetrics(
        3, 1, None, None, None, total_time=0.5, prefill_time=0.25, decode_time=0.0, processed_tokens=3
    )
    found = timings(RequestOutput("a", None, [1, 2, 3], [], finished=False, metrics=metrics, num_cached_tokens=1))
    assert (found.prompt_n, found.prompt_ms, found.prompt_per_token_ms, found.prompt_per_second) == (2, 250, 125, 8)
    assert (found.predicted_n, found.predicted_per_token_ms, found.predicted_per_second) == (1, 0, 0)
    waiting = timings(
        RequestOutput("a", None, [], [], finished=False, metrics=RequestMetrics(0, 0, None, None, None, 0))
    )
    assert set(waiting.model_dump().values()) == {0}


@pytest.mark.native
def test_timings_are_reported_where_asked(tiny: Live) -> None:
    assert "timings" not in tiny.chat(max_tokens=2).json
    for ask in (tiny.chat, tiny.complete):
        answer = ask(max_tokens=3, ignore_eos=True, timings_per_token=True).json
        found = answer["timings"]
        assert found["prompt_n"] + found["cache_n"] == answer["usage"]["prompt_tokens"]
        assert found["predicted_n"] == 3
        assert found["predicted_ms"] > 0
        stream = ask(max_tokens=3, ignore_eos=True, timings_per_token=True, stream=True)
        assert [chunk["timings"]["predicted_n"] for chunk in events(stream.body)][-1] == 3


@pytest.mark.native
def test_fields_that_cannot_change_the_answer_are_accepted(tiny: Live) -> None:
    fields: dict[str, Any] = {"cache_prompt": False, "id_slot": 3, "n_keep": 5, "lora": [], "min_keep": 1}
    answer = tiny.chat(max_tokens=1, **fields)
    assert (answer.status, answer.headers["X-Ferrule-Ignored-Fields"]) == (200, None)


@pytest.mark.native
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"n_predict": 4, "max_tokens": 4}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"grammar": GBNF, "json_schema": SCHEMA}, "json_schema"),
        ({"grammar": GBNF, "response_format": {"type": "json_object"}}, "grammar"),
        ({"t_max_predict_ms": 100}, "t_max_predict_ms"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"samplers": "kfypmt"}, "samplers[1]"),
    ],
)
def test_unsupported_values_are_refused_by_name(tiny: Live, fields: dict[str, Any], param: str) -> None:
    for answer in (tiny.complete(**fields), tiny.chat(**fields)):
        assert (answer.status, answer.error["param"]) == (400, param)
