"""Defaults of answers in `/v1/models`, and the field that ends endless loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ferrule import AsyncLLM
from server.live import Live, events, serving

pytestmark = pytest.mark.native
ENCODER = Path(__file__).parents[1] / "golden/encoders/bert_classifier"
LOOP: dict[str, Any] = {"allowed_token_ids": [300], "max_tokens": 600}
NEUTRAL = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 2048}


def test_models_report_the_defaults_of_answers(tiny: Live, long_model: Path) -> None:
    cards = tiny.request("/v1/models").json["data"]
    assert [card["answer_defaults"] for card in cards] == [{**NEUTRAL, "temperature": 0}] * 2  # of the toy
    with serving(llm=lambda: AsyncLLM(long_model)) as live:
        card = live.request("/v1/models/tiny").json
    assert card["answer_defaults"] == {**NEUTRAL, "temperature": 0.7, "top_p": 0.95, "min_p": 0.05}


def test_an_answer_in_a_loop_is_stopped(tiny: Live) -> None:
    answer = tiny.chat(**LOOP, stop_on_loop=True).json
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "loop")
    assert 128 <= answer["usage"]["completion_tokens"] < 600
    chunks = list(events(tiny.chat(**LOOP, stop_on_loop=True, stream=True).body))
    assert chunks[-1]["choices"][0]["stop_reason"] == "loop"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert choice["message"]["content"].startswith(text[:100])


@pytest.mark.parametrize("fields", [{}, {"stop_on_loop": False}, {"stop_on_loop": True, "ignore_eos": True}])
def test_a_loop_is_allowed_unless_the_request_stops_it(tiny: Live, fields: dict[str, Any]) -> None:
    answer = tiny.chat(**LOOP, **fields).json
    assert answer["usage"]["completion_tokens"] == 600
    assert answer["choices"][0]["finish_reason"] == "length"


def test_other_answers_do_not_change(tiny: Live) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
    assert tiny.chat(**fields, stop_on_loop=True).json["choices"] == tiny.chat(**fields).json["choices"]


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 2}, {"use_beam_search": True, "temperature": 0}])
def test_several_completions_cannot_stop_on_loops(tiny: Live, fields: dict[str, Any]) -> None:
    answer = tiny.chat(**fields, stop_on_loop=True)
    assert (answer.status, answer.error["param"]) == (400, "stop_on_loop")
    assert "must be false unless n and best_of are 1, got True" in answer.error["message"]


def test_a_model_of_embeddings_has_no_defaults() -> None:
    with serving(llm=lambda: AsyncLLM(ENCODER)) as live:
        assert "answer_defaults" not in live.request("/v1/models/tiny").json
