"""Metrics of engines and requests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fakes
from ferrule import LLM, EngineError, InvalidParameterError, SamplingParams
from ferrule._engine.metrics import Histogram

EngineOf = Callable[[LLM], fakes.Engine]


def histogram(values: list[float], bounds: tuple[float, ...] = (1.0, 2.0, 4.0)) -> Histogram:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[sum(bound < value for bound in bounds)] += 1
    return Histogram(bounds, tuple(counts), sum(values), len(values))


def test_empty_histogram() -> None:
    assert histogram([]).mean is None
    assert histogram([]).percentile(50) is None
    with pytest.raises(InvalidParameterError, match="p must be a number from 0 to 100, got 101"):
        histogram([1.0]).percentile(101)


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([0.5] * 4, 50, 0.5),
        ([0.5] * 4, 100, 1.0),
        ([1.5, 1.5, 3.0, 3.0], 50, 2.0),
        ([1.5, 1.5, 3.0, 3.0], 75, 3.0),
        ([0.5, 3.0], 50, 1.0),
        ([9.0], 50, 4.0),
        ([0.5, 9.0], 0, 0.0),
    ],
)
def test_percentiles_of_known_values(values: list[float], p: float, expected: float) -> None:
    assert histogram(values).percentile(p) == pytest.approx(expected)


@given(values=st.lists(st.floats(0.001, 3.999), min_size=1, max_size=40), p=st.integers(1, 99))
def test_percentile_is_in_bucket_of_exact_value(values: list[float], p: int) -> None:
    """The exact percentile is the lowest value that at least p percent of all values do not exceed."""
    found = histogram(values).percentile(p)
    exact = sorted(values)[-(-len(values) * p // 100) - 1]
    edges = (0.0, 1.0, 2.0, 4.0)
    low, high = next((low, high) for low, high in pairwise(edges) if low < exact <= high)
    assert found is not None
    assert low <= found <= high
    assert histogram(values).mean == pytest.approx(sum(values) / len(values))


def test_engine_metrics(llm: LLM) -> None:
    before = llm.metrics()
    assert (before.steps, before.queue_seconds.count) == (0, 0)
    llm.generate(["a", "b"], SamplingParams(max_tokens=5, ignore_eos=True))
    stream = llm.stream("c", SamplingParams(ignore_eos=True))
    next(stream)
    during = llm.metrics()
    assert (during.running, during.waiting) == (1, 0)
    stream.close()
    after = llm.metrics()
    assert after.requests_finished == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    assert after.generated_tokens == 11
    assert after.running == 0
    assert after.queue_seconds.count == after.time_to_first_token_seconds.count == 3
    assert after.inter_token_seconds.count == 8
    assert (after.inter_token_seconds.percentile(50) or 0) > 0


def test_metrics_do_not_wait_for_a_step(llm: LLM, fake_engine: type[fakes.Engine], engine_of: EngineOf) -> None:
    gate = fake_engine.gate = threading.Event()
    thread = threading.Thread(target=llm.generate, args=("x", SamplingParams(max_tokens=1)))
    thread.start()
    while not engine_of(llm).stepping:
        time.sleep(0.001)
    assert llm.metrics().running == 1
    assert engine_of(llm).stepping
    gate.set()
    thread.join()
    llm.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        llm.metrics()


def test_request_times(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    fake_engine.step_seconds = 0.001
    fake_engine.max_num_seqs = 1
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=5, ignore_eos=True))
    for output in outputs:
        metrics = output.metrics
        assert metrics.queue_time is not None
        assert metrics.prefill_time is not None
        assert metrics.decode_time is not None
        assert metrics.prefill_time > 0.0009
        assert metrics.decode_time > 4 * 0.0009
        assert metrics.preemptions == 0
        assert metrics.queue_time + metrics.prefill_time + metrics.decode_time <= metrics.total_time
    assert (outputs[1].metrics.queue_time or 0) > 5 * 0.0009


def test_num_cached_tokens(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    ids = [random.Random(1).randrange(7, 4096) for _ in range(100)]
    once = SamplingParams(max_tokens=1, n=2)
    assert llm.generate({"prompt_token_ids": ids}, once)[0].num_cached_tokens == 0
    assert llm.generate({"prompt_token_ids": ids}, once)[0].num_cached_tokens == 96
    assert llm.generate({"prompt_token_ids": [*ids[:50], 9]}, once)[0].num_cached_tokens == 48
    assert llm.generate({"prompt_token_ids": ids, "cache_salt": "mine"}, once)[0].num_cached_tokens == 0
    assert llm.generate({"prompt_token_ids": ids, "cache_salt": "mine"}, once)[0].num_cached_tokens == 96
    with LLM(enable_prefix_caching=False) as without:
        for _ in range(2):
            assert without.generate({"prompt_token_ids": ids}, once)[0].num_cached_tokens == 0


def test_save_and_restore_state(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    prompt = "Once upon a time there was a king. " * 4
    state = llm.save_state(prompt)
    assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens
    with LLM() as other:
        restored = other.restore_state(state)
        ids = list(restored["prompt_token_ids"])
        assert ids == llm.tokenize(prompt)
        output = other.generate({"prompt_token_ids": [*ids, 9]}, SamplingParams(max_tokens=1))[0]
        assert output.num_cached_tokens == len(ids) // 16 * 16 > 0
        with pytest.raises(InvalidParameterError, match="state must be a state that this model saved"):
            other.restore_state(b"junk")
        with pytest.raises(InvalidParameterError, match=r"state must be bytes that save_state returned, got .junk."):
            other.restore_state("junk")  # type: ignore[arg-type]
    with LLM(enable_prefix_caching=False) as without, pytest.raises(InvalidParameterError, match="prefix_caching"):
        without.restore_state(state)
