"""Structures of outputs that may call tools, on the engine itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ferrule import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from ferrule._text.parsers import MessageFormat
from ferrule.server import ServerSettings
from ferrule.server.call_structure import MAX_GRAMMAR_BYTES, text_with_calls
from server.live import serving

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}, "day": {"type": "boolean"}}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
SPECIAL = SimpleNamespace(
    call_begin="<|system|>", json_call_end="<|assistant|>", keep=frozenset({"<|system|>", "<|assistant|>", "<|user|>"})
)
"""A format whose markers are special tokens."""


def structure(llm: LLM, message_format: Any, strict: set[str]) -> StructuredOutputsParams | None:
    return text_with_calls(TOOLS, strict, message_format, cast("AsyncLLM", llm))


def starting_with(tokens: list[int]) -> Callable[[Any, Any], None]:
    def push(token_ids: Any, logits: Any) -> None:
        if len(token_ids) < len(tokens):
            logits[tokens[len(token_ids)]] += 1000

    return push


@pytest.mark.native
@pytest.mark.parametrize("message_format", [MessageFormat("hermes", "qwen3"), SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize("strict", [{"weather"}, set[str]()])
def test_calls_in_free_text_match_their_tools(solo: LLM, message_format: Any, strict: set[str]) -> None:
    begin, end = message_format.call_begin, message_format.json_call_end
    forced = starting_with(solo.tokenize(f"I see. {begin}\n{{", add_special_tokens=False))
    members: list[set[str]] = []
    for seed in range(8):
        params = SamplingParams(
            seed=seed,
            temperature=1.5,
            max_tokens=150,
            skip_special_tokens=False,
            structured_outputs=structure(solo, message_format, strict),
            logits_processors=[forced],
        )
        text = solo.generate("Hi", params)[0].outputs[0].text
        assert text.startswith(f"I see. {begin}")
        call = json.loads(text.partition(begin)[2].partition(end)[0])
        assert call["name"] == "weather"
        members.append(call["arguments"].keys())
    assert all(each <= {"city", "day"} for each in members)
    assert (min(map(len, members)) == 2) == bool(strict)


@pytest.mark.native
def test_free_text_stays_free(solo: LLM) -> None:
    for message_format in (MessageFormat("hermes"), SPECIAL):
        params = SamplingParams(
            temperature=0, max_tokens=12, structured_outputs=structure(solo, message_format, {"weather"})
        )
        plain = SamplingParams(temperature=0, max_tokens=12)
        found, expected = (solo.generate("Once upon a", each)[0].outputs[0].text for each in (params, plain))
        assert found == expected


def test_calls_stay_free_where_they_cannot_be_constrained(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert structure(llm, MessageFormat("mistral"), {"weather"}) is None
    long = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"title": "a"}}}]
    long[0]["function"]["parameters"] = {"title": "a" * MAX_GRAMMAR_BYTES}  # type: ignore[index]
    assert text_with_calls(long, {"f"}, MessageFormat("hermes"), cast("AsyncLLM", llm)) is None
    monkeypatch.setattr(llm._tokenizer, "_pieces", None)
    assert structure(llm, MessageFormat("hermes"), {"weather"}) is None


@pytest.mark.native
def test_an_unsupported_schema_of_a_strict_tool_is_named() -> None:
    function: dict[str, Any] = {"name": "f", "parameters": {"type": "nothing"}}
    with serving(ServerSettings(tool_call_parser="hermes")) as live:
        for strict, status in ((False, 200), (True, 400)):
            tool = {"type": "function", "function": {**function, "strict": strict}}
            answer = live.chat(tools=[tool], max_tokens=1)
            assert answer.status == status, answer.body
    assert answer.error["param"] == "tools"
