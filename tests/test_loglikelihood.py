"""Log-probabilities of given tokens: prompt_logprobs, and continuations scored by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fakes
from fake_arithmetic import scores_after
from ferrule import LLM, InvalidParameterError, LoglikelihoodOutput, PromptError, SamplingParams

EngineOf = Callable[[LLM], fakes.Engine]


def oracle(engine: fakes.Engine, prompt: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """Computes the expected value from the fake's logits, token by token."""
    logprobs, greedy = list[float](), True
    for position, token in enumerate(continuation, start=len(prompt)):
        before = [*prompt, *continuation][position - 1]
        scores = scores_after(before, position - 1, engine.vocab_size)
        total = math.log(sum(map(math.exp, scores.values())))
        logprobs.append(scores.get(token, -10.0) - total)
        greedy = greedy and token == max(scores, key=lambda t: (scores[t], -t))
    return logprobs, greedy


def test_text_is_appended_without_special_tokens(llm: LLM, engine_of: EngineOf) -> None:
    prompt, continuations = llm.tokenize("The capital of France is"), [" Paris", " a cheese"]
    scores = llm.loglikelihood("The capital of France is", continuations)
    for score, continuation in zip(scores, continuations, strict=True):
        ids = llm.tokenize(continuation, add_special_tokens=False)
        logprobs, greedy = oracle(engine_of(llm), prompt, ids)
        assert score.token_ids == ids
        assert score.token_logprobs == pytest.approx(logprobs)
        assert score.logprob == pytest.approx(sum(logprobs))
        assert score.is_greedy == greedy
    assert not engine_of(llm).running


def test_greedy_continuation_is_greedy(llm: LLM) -> None:
    generated = llm.generate("Once", SamplingParams(temperature=0, max_tokens=5, logprobs=0))[0].outputs[0]
    (score,) = llm.loglikelihood("Once", generated.token_ids)
    assert score.is_greedy
    assert score.logprob == pytest.approx(generated.cumulative_logprob)
    other = [*generated.token_ids[:4], generated.token_ids[4] + 1]
    assert not llm.loglikelihood("Once", other)[0].is_greedy


def test_numpy_token_ids(llm: LLM) -> None:
    ids = [np.int64(9), np.int64(8)]
    (score,) = llm.loglikelihood("Once", ids)  # type: ignore[arg-type]
    assert [score] == llm.loglikelihood("Once", [9, 8])
    assert llm.loglikelihood("Once", [np.array(ids), [7]]) == llm.loglikelihood("Once", [[9, 8], [7]])  # type: ignore[list-item]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    pairs=st.lists(
        st.tuples(
            st.lists(st.integers(7, 4095), min_size=1, max_size=40),
            st.lists(st.integers(7, 4095), min_size=1, max_size=40),
        ),
        max_size=4,
    ),
    chunk=st.integers(1, 50),
)
def test_token_logprobs_equal_reference(
    llm: LLM,
    fake_engine: type[fakes.Engine],
    engine_of: EngineOf,
    pairs: list[tuple[list[int], list[int]]],
    chunk: int,
) -> None:
    """The result does not depend on chunking and caching of the prompt."""
    fake_engine.prefill_chunk = chunk
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in pairs]
    scores = llm.loglikelihood(prompts, [continuation for _, continuation in pairs])
    for score, (prompt, continuation) in zip(scores, pairs, strict=True):
        logprobs, greedy = oracle(engine_of(llm), prompt, continuation)
        assert isinstance(score, LoglikelihoodOutput)
        assert (score.token_ids, score.is_greedy) == (continuation, greedy)
        assert score.token_logprobs == pytest.approx(logprobs)
        assert score.logprob == pytest.approx(sum(logprobs))


def test_only_continuation_is_scored(llm: LLM, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    schedule = fakes.Engine._schedule

    def noting(self: fakes.Engine) -> None:
        schedule(self)
        seen.extend(sequence.params for sequence in self.running.values())

    monkeypatch.setattr(fakes.Engine, "_schedule", noting)
    llm.loglikelihood({"prompt_token_ids": [9] * 50, "cache_salt": "mine"}, [[7, 8]])
    wanted = {"prompt_logprobs": 0, "prompt_logprobs_from": 50, "max_tokens": 1, "cache_salt": "mine"}
    assert wanted.items() <= seen[0].items()


@pytest.mark.parametrize(
    ("prompts", "continuations", "error", "message"),
    [
        (
            ["a", "b"],
            ["c"],
            InvalidParameterError,
            r"continuations must be a list of 2, one for each prompt, got \['c'\]",
        ),
        (
            ["a", "b"],
            "c",
            InvalidParameterError,
            r"continuations must be a list of 2, one for each prompt, got \['c'\]",
        ),
        ("a", 5, InvalidParameterError, "continuations must be text, token ids, or a list of either, got 5"),
        ("a", None, InvalidParameterError, "continuations must be text, token ids, or a list of either, got None"),
        ("a", b"x", InvalidParameterError, "continuations must be text, token ids, or a list of either, got b'x'"),
        ("a", "", PromptError, "continuation '': the prompt has no tokens"),
        ("a", [[]], PromptError, r"continuation \[\]: the prompt has no tokens"),
        ("a", [[4096]], PromptError, r"continuation \[4096\]: prompt_token_ids\[0\] must be from 0 to 4095 \(the"),
        ("a", ["b", None], PromptError, "continuation None: prompt_token_ids must be a list of integers, got None"),
        ("a", ["\ud800"], PromptError, "lone surrogate"),
        ("", "b", PromptError, "the prompt has no tokens"),
        (
            {"prompt_token_ids": [7] * 2000},
            [[7] * 48],
            PromptError,
            "the prompt has 2048 tokens, more than the limit of 2047: max_model_len allows",
        ),
    ],
)
def test_invalid_arguments(
    prompts: Any, continuations: Any, error: type[Exception], message: str, llm: LLM, engine_of: EngineOf
) -> None:
    with pytest.raises(error, match=message):
        llm.loglikelihood(prompts, continuations)
    assert engine_of(llm).steps == 0


def test_empty_inputs(llm: LLM) -> None:
    assert llm.loglikelihood([], []) == []
    assert llm.loglikelihood("a", []) == []


def test_prompt_logprobs(llm: LLM, fake_engine: type[fakes.Engine], engine_of: EngineOf) -> None:
    fake_engine.prefill_chunk = 3
    ids = llm.tokenize("The capital of France is Paris")
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, n=2)
    output = llm.generate("The capital of France is Paris", params)[0]
    rows = output.prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    logprobs, _ = oracle(engine_of(llm), ids[:1], ids[1:])
    for token, row, logprob in zip(ids[1:], rows[1:], logprobs, strict=True):
        assert row is not None
        assert next(iter(row)) == token
        assert row[token].logprob == pytest.approx(logprob)
        assert row[token].decoded_token == llm.token_text(token)
        assert {1, 2, 3} <= {entry.rank for entry in row.values()}
    assert engine_of(llm).steps > 2
    only = llm.generate("The capital", SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert [len(row) for row in only or [] if row is not None] == [1]
    assert llm.generate("The capital", SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_stream_yields_nothing_before_first_token(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    fake_engine.prefill_chunk = 3
    deltas = list(llm.stream({"prompt_token_ids": [9] * 20}, SamplingParams(max_tokens=3, prompt_logprobs=0)))
    assert all(delta.token_ids for delta in deltas)
    assert deltas[-1].output is not None
    assert len(deltas[-1].output.prompt_logprobs or []) == 20
