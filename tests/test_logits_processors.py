"""Logits processors on the real engine."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ferrule import LLM, AsyncLLM, EngineError, LogitsProcessorError, RequestOutput, SamplingParams

pytestmark = pytest.mark.native

PROMPT = "Once upon a time,"


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(threads=2) as llm:
        yield llm


def greedy(*processors: Any, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logits_processors=processors, **more)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_processor_receives_tokens_and_logits(tiny: LLM) -> None:
    calls: list[tuple[list[int], list[int], Any]] = []

    def watch(prompt: Any, output: Any, logits: Any) -> None:
        assert (prompt.dtype, output.dtype, logits.dtype) == (np.int32, np.int32, np.float32)
        assert not prompt.flags.writeable
        assert not output.flags.writeable
        calls.append((prompt.tolist(), output.tolist(), logits.copy()))

    written = tiny.generate(PROMPT, greedy(watch))[0]
    assert tokens([written]) == tokens(tiny.generate(PROMPT, greedy()))
    ids = written.outputs[0].token_ids
    assert [call[:2] for call in calls] == [(written.prompt_token_ids, ids[:count]) for count in range(8)]
    rows = tiny.logits([*written.prompt_token_ids, *ids])[len(written.prompt_token_ids) - 1 : -1]
    np.testing.assert_array_equal([call[2] for call in calls], rows)


def test_logits_array_is_reused(tiny: LLM) -> None:
    seen: set[int] = set()

    def watch(_: Any, logits: Any) -> None:
        seen.add(logits.ctypes.data)

    tiny.generate([PROMPT, "The capital"], greedy(watch))
    tiny.generate(PROMPT, greedy(watch))
    assert len(seen) == 1


def test_changed_or_returned_logits_are_sampled(tiny: LLM) -> None:
    def in_place(output: Any, logits: Any) -> None:
        logits[:] = -np.inf
        logits[100 + len(output)] = 0

    def returned(output: Any, logits: Any) -> Any:
        return np.where(np.arange(len(logits)) == 100 + len(output), 1.0, -np.inf).astype(np.float32)

    for processor in (in_place, returned):
        assert tokens(tiny.generate(PROMPT, greedy(processor))) == [list(range(100, 108))]


def test_processors_run_in_order_between_sampling_stages(tiny: LLM) -> None:
    orders: list[str] = []

    def first(_: Any, logits: Any) -> None:
        orders.append("first")
        assert np.isneginf(np.delete(logits, [100, 101, 102])).all()
        logits[100] = 50

    def second(_: Any, logits: Any) -> None:
        orders.append("second")
        assert logits[100] == 50
        logits[101] = 40.25

    # Allowed tokens apply before and penalties after the processor: token 100 loses its lead of 10 after five uses.
    params = greedy(first, second, allowed_token_ids=[100, 101, 102], frequency_penalty=2.0, presence_penalty=0.5)
    assert tokens(tiny.generate(PROMPT, params)) == [[100, 100, 100, 100, 100, 101, 100, 101]]
    assert orders == ["first", "second"] * 8


def test_error_fails_only_its_request(tiny: LLM) -> None:
    def fails_at_three(output: Any, _: Any) -> None:
        if len(output) == 3:
            raise KeyError("three")

    alone = tokens(tiny.generate(PROMPT, greedy()))[0]
    found: list[Any] = []

    def beside() -> None:
        found.extend(tokens(tiny.generate([PROMPT] * 4, greedy())))

    neighbour = threading.Thread(target=beside)
    neighbour.start()
    with pytest.raises(LogitsProcessorError, match=r"logits_processors\[1\] raised KeyError: 'three'") as caught:
        tiny.generate(PROMPT, greedy(lambda _, logits: None, fails_at_three))
    neighbour.join()
    assert isinstance(caught.value.__cause__, KeyError)
    assert found == [alone] * 4
    assert tokens(tiny.generate(PROMPT, greedy())) == [alone]
    metrics = tiny.metrics()
    assert metrics.pages_free == metrics.pages_total


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda _, logits: logits.fill(np.nan), "ValueError: logits must be finite or minus infinity, got nan"),
        (
            lambda _, logits: logits.__setitem__(3, np.inf),
            "ValueError: logits must be finite or minus infinity, got inf",
        ),
        (
            lambda _, logits: logits[:-1],
            r"TypeError: a logits processor must return None or an array of shape .*, got an array of shape \(\d+,\)",
        ),
        (
            lambda _, logits: [1.0],
            "TypeError: a logits processor must return None or an array of shape .*, got <class 'list'>",
        ),
        (lambda _, logits: logits.astype(complex), "TypeError: Cannot cast"),
        (lambda: None, "TypeError: .* takes 0 positional arguments"),
    ],
)
def test_invalid_logits_are_rejected(processor: Any, message: str, tiny: LLM) -> None:
    with pytest.raises(LogitsProcessorError, match=rf"logits_processors\[0\] raised {message}"):
        tiny.generate(PROMPT, greedy(processor))


def test_modified_array_attributes_do_not_affect_others(tiny: LLM) -> None:
    alone = tokens(tiny.generate(PROMPT, greedy()))

    def reshape(_: Any, logits: Any) -> None:
        logits.shape = (2, -1)

    def retype(_: Any, logits: Any) -> None:
        logits.dtype = np.int32

    def lock(_: Any, logits: Any) -> None:
        logits.flags.writeable = False

    for harmless in (reshape, retype, lock):
        assert tokens(tiny.generate(PROMPT, greedy(harmless, lambda _, logits: logits[100] and None))) == alone

    def shrink(_: Any, logits: Any) -> None:
        logits.resize(1, refcheck=False)

    with pytest.raises(LogitsProcessorError, match="ValueError: cannot resize"):
        tiny.generate(PROMPT, greedy(shrink))
    assert tokens(tiny.generate(PROMPT, greedy(lambda _, logits: None))) == alone


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_base_exceptions_fail_the_request(kind: type[BaseException], tiny: LLM) -> None:
    def leave(*_: Any) -> None:
        raise kind

    with pytest.raises(LogitsProcessorError, match=rf"logits_processors\[0\] raised {kind.__name__}") as caught:
        tiny.generate(PROMPT, greedy(leave))
    assert isinstance(caught.value.__cause__, kind)


def test_forbidding_every_token_names_the_stage(tiny: LLM) -> None:
    with pytest.raises(EngineError, match=r"every one is forbidden \(last by logits_processors"):
        tiny.generate(PROMPT, greedy(lambda _, logits: logits.fill(-np.inf)))


def test_processor_cannot_call_its_engine(tiny: LLM) -> None:
    for call in (
        lambda: tiny.generate("x"),
        lambda: tiny.logits([5]),
        lambda: tiny.save_state("x"),
        tiny.close,
    ):
        with pytest.raises(LogitsProcessorError, match="EngineError: a logits processor must not call the engine"):
            tiny.generate(PROMPT, greedy(lambda _, logits, call=call: call() and None))
    with LLM(threads=1) as other:
        expected = tokens(tiny.generate("x", greedy()))

        def ask(_: Any, logits: Any) -> None:
            assert tokens(other.generate("x", greedy())) == expected

        tiny.generate(PROMPT, greedy(ask, min_tokens=2))


def test_garbage_collected_stream_is_aborted(tiny: LLM) -> None:
    streams: list[Any] = [tiny.stream(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))]
    next(streams[0])

    def forget(_: Any, logits: Any) -> None:
        streams.clear()
        gc.collect()

    tiny.generate(PROMPT, greedy(forget))
    metrics = tiny.metrics()
    assert (metrics.running, metrics.pages_free) == (0, metrics.pages_total)


def test_interrupt_in_processor_reaches_only_the_caller(tiny: LLM) -> None:
    def interrupt(output: Any, _: Any) -> None:
        if len(output) == 2 and not interrupted:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            # The signal handler runs here.
            for _ in range(1000):
                pass

    interrupted: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(PROMPT, greedy(interrupt))
    assert interrupted
    metrics = tiny.metrics()
    assert (metrics.running, metrics.pages_free) == (0, metrics.pages_total)
    assert len(tokens(tiny.generate(PROMPT, greedy()))[0]) == 8


def test_processors_of_completions_are_independent(tiny: LLM) -> None:
    def favour(output: Any, logits: Any) -> None:
        logits[200 + len(output)] += 100

    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, ignore_eos=True, logits_processors=[favour])
    assert [output.token_ids for output in tiny.generate(PROMPT, params)[0].outputs] == [[200, 201, 202, 203]] * 3


def test_async_llm_with_processors() -> None:
    async def ask() -> list[int]:
        async with AsyncLLM(threads=1) as engine:
            last: Any = None
            async for output in engine.generate(PROMPT, greedy(lambda output, x: x.__setitem__(len(output) + 50, 99))):
                last = output
            with pytest.raises(LogitsProcessorError):
                async for _ in engine.generate(PROMPT, greedy(lambda _, logits: 1 / 0)):
                    pass
            return last.outputs[0].token_ids

    assert asyncio.run(ask()) == list(range(50, 58))
