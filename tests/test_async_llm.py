"""AsyncLLM on a fake engine: FAULTS rows 68 to 70, 72, 73, 79 and 81, as far as Python has a part in them."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fakes
from ferrule import (
    LLM,
    AsyncLLM,
    ChatTemplateError,
    EngineError,
    InvalidParameterError,
    PromptError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)

TESTS = Path(__file__).parent
SLACK = 5.0
"""Machines are noisy: what FAULTS.md promises, so many times over."""
LONG = SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)


def sampled(length: int, seed: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True, **more)


def run(test: Callable[[], Coroutine[Any, Any, None]], debug: bool = True) -> None:
    """Runs a test in an event loop that reports whatever nobody else caught."""
    caught: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))
        await asyncio.wait_for(test(), 30)
        gc.collect()
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    asyncio.run(watched(), debug=debug)
    assert not caught


@pytest.fixture
def engine(fake_engine: type[fakes.Engine]) -> Iterator[type[fakes.Engine]]:
    """Leaves no thread behind."""
    yield fake_engine
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "ferrule-engine"]


def fake_of(llm: AsyncLLM) -> fakes.Engine:
    found: Any = llm._driver._engine
    assert isinstance(found, fakes.Engine)
    return found


async def last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def all_free(llm: AsyncLLM) -> None:
    """Nothing is left: neither in the engine nor on the way there."""
    await until(lambda: not fake_of(llm).running)
    thread = llm._engine_thread
    await until(lambda: not thread._routes and not thread._inboxes)
    assert not llm._registry.all()
    assert llm._registry._sequences == 0
    assert not llm._driver._inboxes


def test_outputs_are_cumulative_and_equal_to_those_of_llm(engine: type[fakes.Engine]) -> None:
    with LLM() as plain:
        expected = plain.generate("The capital", sampled(9, logprobs=2))[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            outputs = [output async for output in llm.generate("The capital", sampled(9, logprobs=2))]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            for before, after in pairwise(outputs):
                count = len(before.outputs[0].token_ids)
                assert 0 < count < len(after.outputs[0].token_ids)
                assert after.outputs[0].token_ids[:count] == before.outputs[0].token_ids
            assert outputs[-1].outputs == expected.outputs
            assert outputs[-1].prompt_token_ids == expected.prompt_token_ids
            deltas = [delta async for delta in llm.stream("The capital", sampled(9, logprobs=2))]
            assert "".join(delta.text for delta in deltas) == expected.outputs[0].text
            assert [token for delta in deltas for token in delta.token_ids] == expected.outputs[0].token_ids
            assert [row for delta in deltas for row in delta.logprobs or []] == expected.outputs[0].logprobs
            assert [delta.output is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
            await all_free(llm)

    run(test)


def test_n_completions_come_together(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001
    with LLM() as plain:
        expected = plain.generate("x", sampled(12, n=4))[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            output = await last(llm.generate("x", sampled(12, n=4)))
            assert output.outputs == expected.outputs
            assert len(fake_of(llm).forks) == 3
            assert len({origin for _, origin in fake_of(llm).forks}) == 1
            with pytest.raises(InvalidParameterError, match="n is 2; a stream has one completion"):
                await anext(llm.stream("x", sampled(2, n=2)))
            await all_free(llm)

    run(test)


def test_stop_strings_end_the_request_in_the_engine(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            tokens = llm.tokenize("Paris is big.")
            engine.script = staticmethod(lambda _: [*tokens, *tokens * 200])  # type: ignore[assignment]
            params = SamplingParams(stop="is b", n=3)
            output = await last(llm.generate("x", params))
            assert [(c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [
                ("Paris ", "stop", "is b")
            ] * 3
            await all_free(llm)

    run(test)


def test_a_stop_string_ends_one_completion_of_several(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.002
    with LLM() as plain:
        first, second = (completion.text for completion in plain.generate("x", sampled(300, n=2))[0].outputs)
    stop = next(first[i : i + 4] for i in range(5, 50) if first[i : i + 4] not in second)

    async def test() -> None:
        async with AsyncLLM() as llm:
            task = asyncio.create_task(last(llm.generate("x", sampled(300, n=2, stop=stop))))
            await until(lambda: bool(fake_of(llm).aborted))
            assert len(fake_of(llm).running) == 1, "the engine goes on with what has ended"
            assert not task.done()
            output = await task
            assert [completion.finish_reason for completion in output.outputs] == ["stop", "length"]
            assert [completion.text for completion in output.outputs] == [first[: first.index(stop)], second]
            await all_free(llm)

    run(test)


def test_chat(engine: type[fakes.Engine]) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    with LLM() as plain:
        expected = plain.chat(messages, sampled(5))[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            output = await last(llm.chat(messages, sampled(5), "mine", priority=3))
            assert output.request_id == "mine"
            assert (output.prompt_token_ids, output.outputs) == (expected.prompt_token_ids, expected.outputs)
            with pytest.raises(ChatTemplateError):
                await last(llm.chat(messages, chat_template="{{ raise_exception('no') }}"))
            await all_free(llm)

    run(test)


BAD: list[tuple[Callable[[AsyncLLM], AsyncGenerator[Any, None]], type[Exception], str]] = [
    (lambda llm: llm.generate(""), PromptError, "the prompt is empty"),
    (lambda llm: llm.generate(None), PromptError, "a prompt is None"),  # type: ignore[arg-type]
    (lambda llm: llm.generate({"prompt_token_ids": [-1]}), PromptError, r"prompt_token_ids\[0\] is -1"),
    (lambda llm: llm.generate({"prompt_token_ids": [1] * 9000}), PromptError, "has 9000 tokens"),
    (lambda llm: llm.generate("x", 5), InvalidParameterError, "sampling_params is 5"),  # type: ignore[arg-type]
    (lambda llm: llm.stream("x", request_id=5), InvalidParameterError, "request_id is 5"),  # type: ignore[arg-type]
    (lambda llm: llm.stream("x", priority=2**31), InvalidParameterError, "priority is 2147483648"),
    (lambda llm: llm.generate("x", SamplingParams(stop_token_ids=[4096])), InvalidParameterError, "token id 4096"),
    (lambda llm: llm.chat(5), ChatTemplateError, "messages is 5; it must be a list of messages"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_a_bad_request_is_refused_and_forgotten(
    call: Callable[[AsyncLLM], AsyncGenerator[Any, None]],
    error: type[Exception],
    message: str,
    engine: type[fakes.Engine],
) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            with pytest.raises(error, match=message):
                await anext(call(llm))
            await all_free(llm)
            assert fake_of(llm).steps == 0

    run(test)


def test_what_the_engine_refuses_reaches_its_caller_alone(
    engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = fakes.Engine.add_request

    def add_or_refuse(self: fakes.Engine, prompt: list[int], params: str, fork_of: int | None = None) -> int:
        if prompt == [9] and fork_of is not None:
            raise PromptError("no room")
        return add(self, prompt, params, fork_of)

    monkeypatch.setattr(engine, "add_request", add_or_refuse)

    async def test() -> None:
        async with AsyncLLM() as llm:
            beside = asyncio.create_task(last(llm.generate("x", sampled(30))))
            with pytest.raises(PromptError, match="no room"):
                await last(llm.generate({"prompt_token_ids": [9]}, sampled(5, n=3)))
            assert len((await beside).outputs[0].token_ids) == 30
            await all_free(llm)

    run(test)


def test_a_request_whose_numbers_go_wrong_fails_alone(engine: type[fakes.Engine]) -> None:
    engine.bad_prompt = [9]

    async def test() -> None:
        async with AsyncLLM() as llm:
            for _ in range(2):  # beside another request, and alone
                beside = asyncio.create_task(last(llm.generate("x", sampled(30))))
                with pytest.raises(EngineError, match="logits are not finite"):
                    await last(llm.generate({"prompt_token_ids": [9]}, sampled(5, n=2)))
                await beside
                await all_free(llm)
                await llm.check_health()

    run(test)


def test_abort(engine: type[fakes.Engine]) -> None:
    """Before the request is added, in its prefill, in mid-stream, and with n=4."""
    engine.step_seconds = 0.002
    engine.prefill_chunk = 10
    prompt: Any = {"prompt_token_ids": [7] * 1000}

    async def aborted(llm: AsyncLLM, when: Callable[[], Awaitable[None]], params: SamplingParams) -> RequestOutput:
        task = asyncio.create_task(last(llm.generate(prompt, params, "mine")))
        await when()
        await llm.abort("mine")
        return await task

    async def test() -> None:
        async with AsyncLLM() as llm:
            fake = fake_of(llm)
            await llm.abort("nobody")

            async def at_once() -> None:
                await asyncio.sleep(0)

            async def prefilling() -> None:
                await until(lambda: any(10 <= sequence.computed < 900 for sequence in list(fake.running.values())))

            async def streaming() -> None:
                await until(lambda: any(len(sequence.output) > 3 for sequence in list(fake.running.values())))

            for when in (at_once, prefilling, streaming):
                for n in (1, 4):
                    output = await aborted(llm, when, sampled(500, n=n))
                    assert output.finished
                    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * n
                    assert (len(output.outputs[0].token_ids) > 0) == (when is streaming)
                    steps = fake.steps
                    await all_free(llm)
                    assert fake.steps <= steps + 2
            with LLM() as plain:
                expected = plain.generate("x", sampled(5))[0].outputs
            assert (await last(llm.generate("x", sampled(5), "mine"))).outputs == expected

    run(test)


def test_an_abort_before_the_engine_has_heard_of_the_request(engine: type[fakes.Engine]) -> None:
    """While its text is being read, and in the middle of a step."""
    engine.step_seconds = 0.2

    async def test() -> None:
        async with AsyncLLM() as llm:
            task = asyncio.create_task(last(llm.generate("text " * 1500, sampled(3, n=2), "read")))
            await asyncio.sleep(0)
            assert llm._registry.find("read") is not None
            await llm.abort("read")
            assert [completion.finish_reason for completion in (await task).outputs] == ["abort"] * 2
            beside = asyncio.create_task(last(llm.generate("x", sampled(2))))
            await until(lambda: fake_of(llm).stepping)
            task = asyncio.create_task(last(llm.generate("y", sampled(3, n=2), "posted")))
            await asyncio.sleep(0)
            assert llm._registry.find("posted") is not None
            await llm.abort("posted")
            output = await task
            assert fake_of(llm).stepping, "an abort waited for a step"
            assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 2
            await beside
            await all_free(llm)
            assert fake_of(llm).next_id == 1

    run(test)


def test_an_abort_lets_out_the_text_that_was_held_back(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.005

    async def test() -> None:
        async with AsyncLLM() as llm:
            tokens = llm.tokenize("Paris" + " is" * 400)
            engine.script = staticmethod(lambda _: tokens)  # type: ignore[assignment]
            stream = llm.stream("x", SamplingParams(stop="Paris is is is is is is is is is small"), "mine")
            first = await anext(stream)
            assert "Paris".startswith(first.text)
            await llm.abort("mine")
            end = [delta async for delta in stream][-1]
            assert end.output is not None
            completion = end.output.outputs[0]
            assert first.text + end.text == completion.text
            assert completion.text == llm.detokenize(completion.token_ids)

    run(test)


def test_cancelling_at_random_moments(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001
    engine.prefill_chunk = 20
    generator = random.Random(4)

    async def test() -> None:
        async with AsyncLLM() as llm:
            prompts: list[Any] = ["x", "a text " * 700, {"prompt_token_ids": [9] * 200}]
            expected = (await last(llm.generate("canary", sampled(20)))).outputs
            for _ in range(60):
                canary = asyncio.create_task(last(llm.generate("canary", sampled(20))))
                params = sampled(50, n=generator.choice([1, 4]))
                task = asyncio.create_task(last(llm.generate(generator.choice(prompts), params)))
                for _ in range(generator.randrange(4)):
                    await asyncio.sleep(0)
                await asyncio.sleep(generator.choice([0, 0.001, 0.004, 0.02]))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await canary).outputs == expected
            await all_free(llm)

    run(test)


def test_leaving_the_loop_ends_the_request(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001

    async def test() -> None:
        async with AsyncLLM() as llm:
            async for _ in llm.generate("x", LONG):
                break
            async for _ in llm.stream("x", LONG):
                break
            generator = llm.generate("x", LONG)
            await anext(generator)
            await generator.aclose()
            await all_free(llm)
            assert fake_of(llm).finished["abort"] == 3

    run(test)


def test_a_stream_that_is_not_read_runs_nothing(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            stream, outputs = llm.stream("x"), llm.generate("x")
            await asyncio.sleep(0.01)
            assert not fake_of(llm).running
            await stream.aclose()
            await outputs.aclose()

    run(test)


def test_a_slow_reader_gets_the_newest_state(engine: type[fakes.Engine]) -> None:
    with LLM() as plain:
        expected = plain.generate("x", sampled(300))[0].outputs

    async def test() -> None:
        async with AsyncLLM() as llm:
            outputs, deltas = llm.generate("x", sampled(300)), llm.stream("x", sampled(300))
            first, start = await asyncio.gather(anext(outputs), anext(deltas))
            await until(lambda: not fake_of(llm).running)
            await asyncio.sleep(0.01)
            assert not llm._registry.all(), "a request that nobody reads counts as running"
            rest = [output async for output in outputs]
            assert len(rest) == (0 if first.finished else 1)
            assert [first, *rest][-1].outputs == expected
            ends = [delta async for delta in deltas]
            assert len(ends) == (0 if start.output else 1)
            assert [token for delta in [start, *ends] for token in delta.token_ids] == expected[0].token_ids

    run(test)


def test_the_engine_dies(engine: type[fakes.Engine]) -> None:
    engine.dies_at = 5
    engine.step_seconds = 0.001

    async def test() -> None:
        async with AsyncLLM() as llm:
            await llm.check_health()
            tasks = [asyncio.create_task(last(llm.generate(f"x {i}", LONG))) for i in range(5)]
            start = time.monotonic()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [EngineError] * 5
            assert {str(result) for result in results} == {"the engine died: a worker panicked"}

            async def sick() -> None:
                while True:
                    await llm.check_health()
                    await asyncio.sleep(0.001)

            with pytest.raises(EngineError, match="the engine is dead: a worker panicked"):
                await asyncio.wait_for(sick(), 2 * SLACK)
            assert time.monotonic() - start < 2 * SLACK
            with pytest.raises(EngineError, match="the engine is dead"):
                await last(llm.generate("x"))

    run(test)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_the_thread_itself_fails(
    kind: type[BaseException], engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: fakes.Engine) -> list[fakes.StepOutput]:
        raise kind("a defect")

    async def test() -> None:
        async with AsyncLLM() as llm:
            await last(llm.generate("x", sampled(3)))
            monkeypatch.setattr(engine, "step", step)
            results = await asyncio.gather(
                *(last(llm.generate("x", sampled(3))) for _ in range(3)), return_exceptions=True
            )
            assert [type(result) for result in results] == [EngineError] * 3
            assert len(set(map(id, results))) == 3
            for call in (llm.check_health(), last(llm.generate("x"))):
                with pytest.raises(EngineError, match=r"the engine's thread failed: .*a defect"):
                    await call

    run(test)


def test_a_defect_while_reading_ends_that_request(engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine.step_seconds = 0.001

    async def test() -> None:
        async with AsyncLLM() as llm:
            stream = llm.stream("x", LONG)
            await anext(stream)
            with monkeypatch.context() as patch:
                patch.setattr(llm._tokenizer, "_token_bytes", lambda _: 1 / 0)
                with pytest.raises(EngineError, match="ZeroDivisionError"):
                    await asyncio.wait_for(_rest(stream), 10)
            await all_free(llm)
            await llm.check_health()

    run(test)


async def _rest(stream: AsyncGenerator[Any, None]) -> None:
    async for _ in stream:
        pass


def test_names(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001

    async def test() -> None:
        async with AsyncLLM() as llm:
            first = llm.generate("x", LONG, "0")
            assert (await anext(first)).request_id == "0"
            with pytest.raises(InvalidParameterError, match="request_id is '0'; a request of that name still runs"):
                await last(llm.generate("x", request_id="0"))
            assert (await last(llm.generate("x", sampled(2)))).request_id == "1"
            await first.aclose()
            assert (await last(llm.generate("x", sampled(2), "0"))).request_id == "0"

    run(test)


def test_drain_waits(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.002

    async def test() -> None:
        async with AsyncLLM() as llm:
            await llm.drain(0)
        async with AsyncLLM() as llm:
            tasks = [asyncio.create_task(last(llm.generate("x", sampled(40)))) for _ in range(3)]
            await until(lambda: len(fake_of(llm).running) == 3)
            drained = asyncio.create_task(llm.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="the engine is draining; it takes no new requests"):
                await last(llm.generate("x"))
            await llm.check_health()
            assert not drained.done()
            await drained
            assert [(await task).outputs[0].finish_reason for task in tasks] == ["length"] * 3
            with pytest.raises(InvalidParameterError, match="timeout is -1"):
                await llm.drain(-1)

    run(test)


def test_drain_aborts_after_its_time(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.002

    async def test() -> None:
        async with AsyncLLM() as llm:
            tasks = [asyncio.create_task(last(llm.generate("x", LONG))) for _ in range(3)]
            unread = llm.stream("x", LONG)
            await anext(unread)
            await llm.drain(0.05)
            outputs = [(await task).outputs[0] for task in tasks]
            assert [output.finish_reason for output in outputs] == ["abort"] * 3
            assert all(output.token_ids for output in outputs)
            assert [delta async for delta in unread][-1].output is not None
            await all_free(llm)

    run(test)


def test_aclose_ends_what_runs(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.05

    async def test() -> None:
        llm = AsyncLLM()
        tasks = [asyncio.create_task(last(llm.generate("x", LONG))) for _ in range(3)]
        await until(lambda: bool(fake_of(llm).running))
        ticks = 0

        async def ticking() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(ticking())
        await asyncio.gather(llm.aclose(), llm.aclose())
        ticker.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["the engine is closed"] * 3
        for call in (llm.check_health(), last(llm.generate("x")), anext(llm.stream("x"))):
            with pytest.raises(EngineError, match="the engine is closed"):
                await call
        with pytest.raises(EngineError, match="the engine is closed"):
            llm.metrics()
        await llm.aclose()
        assert llm.tokenize("x")
        assert not llm._engine_thread.alive

    run(test)


def test_closing_what_never_ran_and_closing_without_a_loop(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            pass
        with pytest.raises(EngineError, match="the engine is closed"):
            await llm.check_health()

    run(test)
    llm = AsyncLLM()
    asyncio.run(last(llm.generate("x", sampled(3))))  # type: ignore[arg-type]
    llm.close()
    assert not llm._engine_thread.alive
    with AsyncLLM() as llm:
        asyncio.run(last(llm.generate("x", sampled(3))))  # type: ignore[arg-type]
    assert not llm._engine_thread.alive


def test_an_async_llm_that_is_dropped_ends_its_thread(engine: type[fakes.Engine]) -> None:
    llm = AsyncLLM()
    asyncio.run(last(llm.generate("x", sampled(3))))  # type: ignore[arg-type]
    thread, gone = llm._engine_thread._thread, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()


def test_two_loops_in_two_threads(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001
    with LLM() as plain:
        expected = [plain.generate(f"x {i}", sampled(30, seed=i))[0].outputs for i in range(8)]
    llm = AsyncLLM()
    results: dict[int, Any] = {}

    async def work(numbers: range) -> None:
        outputs = await asyncio.gather(*(last(llm.generate(f"x {i}", sampled(30, seed=i))) for i in numbers))
        results.update(zip(numbers, outputs, strict=True))
        other = "from the other loop"
        if numbers[0] == 0:
            output = await last(llm.generate("x", LONG, other))
            assert output.outputs[0].finish_reason == "abort"
        else:
            await until(lambda: llm._registry.find(other) is not None)
            await asyncio.sleep(0.01)
            await llm.abort(other)

    threads = [
        threading.Thread(target=asyncio.run, args=(work(numbers),), kwargs={"debug": True})
        for numbers in (range(4), range(4, 8))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [results[i].outputs for i in range(8)] == expected
    assert not llm._registry.all()
    llm.close()


def test_a_loop_that_is_closed_under_its_requests(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001
    llm = AsyncLLM()
    loop = asyncio.new_event_loop()
    generator = llm.generate("x", LONG)
    loop.run_until_complete(anext(generator))
    loop.close()

    async def test() -> None:
        assert (await last(llm.generate("y", sampled(3)))).finished
        await all_free(llm)
        await llm.aclose()

    run(test)
    with pytest.raises(StopIteration):
        generator.aclose().send(None)


def test_a_full_queue_is_told_at_once(engine: type[fakes.Engine]) -> None:
    """In the middle of a step that takes much longer than the answer may."""
    engine.step_seconds = 1.0

    async def test() -> None:
        async with AsyncLLM(max_queued_requests=3, max_num_seqs=1) as llm:
            tasks = [asyncio.create_task(last(llm.generate("x", sampled(1))))]
            await until(lambda: fake_of(llm).stepping)
            tasks += [asyncio.create_task(last(llm.generate("x", sampled(1)))) for _ in range(3)]
            await asyncio.sleep(0)
            start = time.monotonic()
            with pytest.raises(QueueFullError, match="3 requests wait; the limit is max_queued_requests, 3"):
                await last(llm.generate("x", sampled(1)))
            assert time.monotonic() - start < 0.05 * SLACK
            assert fake_of(llm).stepping
            assert llm.metrics().requests_refused == 1
            engine.step_seconds = 0.001
            assert all([(await task).finished for task in tasks])
            with pytest.raises(QueueFullError, match="0 requests wait; the limit is max_queued_requests, 3"):
                await last(llm.generate("x", sampled(1, n=4)))
            assert len((await last(llm.generate("x", sampled(1, n=3)))).outputs) == 3
            await all_free(llm)

    run(test)


def test_running_requests_do_not_count_as_waiting(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.002

    async def test() -> None:
        async with AsyncLLM(max_queued_requests=2) as llm:
            tasks: list[asyncio.Task[RequestOutput]] = []
            for _ in range(10):
                tasks.append(asyncio.create_task(last(llm.generate("x", sampled(100)))))
                await until(lambda: fake_of(llm)._waiting() == 0 and len(fake_of(llm).running) == len(tasks))
            assert all([(await task).finished for task in tasks])
        async with AsyncLLM() as llm:
            assert fake_of(llm).options["max_queued_requests"] == 1024

    run(test)


def test_reading_long_texts_does_not_hold_up_the_loop(engine: type[fakes.Engine]) -> None:
    text = "The capital of France is Paris. " * 3000

    async def test() -> None:
        async with AsyncLLM() as llm:
            worst, stop = 0.0, False

            async def ticking() -> None:
                nonlocal worst
                while not stop:
                    before = time.monotonic()
                    await asyncio.sleep(0.001)
                    worst = max(worst, time.monotonic() - before)

            ticker = asyncio.create_task(ticking())
            where: list[bool] = []
            encode = llm._tokenizer.encode

            def noting(*arguments: Any, **more: Any) -> list[int]:
                where.append(threading.current_thread() is threading.main_thread())
                return encode(*arguments, **more)

            llm._tokenizer.encode = noting  # type: ignore[method-assign]
            for call in (llm.generate(text), llm.chat([{"role": "user", "content": text}])):
                with pytest.raises(PromptError, match="max_model_len"):
                    await last(call)
            await last(llm.generate("x", sampled(1)))
            stop = True
            await ticker
            assert where == [False, False, True]
            assert worst < 0.02 * SLACK

    run(test, debug=False)


def test_prompt_logprobs(engine: type[fakes.Engine]) -> None:
    engine.prefill_chunk = 7
    params = sampled(3, prompt_logprobs=2, n=2)
    with LLM() as plain:
        expected = plain.generate({"prompt_token_ids": list(range(50, 80))}, params)[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            prompt: Any = {"prompt_token_ids": list(range(50, 80))}
            outputs = [output async for output in llm.generate(prompt, params)]
            assert all(output.outputs[0].token_ids for output in outputs)
            assert outputs[-1].prompt_logprobs == expected.prompt_logprobs
            assert len(outputs[-1].prompt_logprobs or []) == 30
            deltas = [d async for d in llm.stream(prompt, sampled(3, prompt_logprobs=0))]
            assert all(delta.token_ids for delta in deltas)
            assert deltas[-1].output is not None
            assert len(deltas[-1].output.prompt_logprobs or []) == 30

    run(test)


def test_a_thousand_requests_of_which_a_third_disconnects(engine: type[fakes.Engine]) -> None:
    """Nothing is left running, nothing is mixed up: each response is the beginning of what the request gets alone."""
    engine.max_num_seqs = 64
    generator = random.Random(9)
    with LLM() as plain:
        alone = [plain.generate(f"prompt {i}", sampled(12, seed=i))[0].outputs[0].token_ids for i in range(100)]

    async def test() -> None:
        async with AsyncLLM() as llm:
            finished = 0

            async def client(number: int) -> None:
                nonlocal finished
                kind, tokens = number % 100, list[int]()
                if generator.random() < 0.3:
                    stop = generator.randrange(12)
                    async for delta in llm.stream(f"prompt {kind}", sampled(12, seed=kind)):
                        tokens += delta.token_ids
                        if len(tokens) >= stop:
                            break
                    assert tokens == alone[kind][: len(tokens)]
                else:
                    output = await last(llm.generate(f"prompt {kind}", sampled(12, seed=kind)))
                    assert output.outputs[0].token_ids == alone[kind]
                    finished += 1

            await asyncio.gather(*(client(number) for number in range(1000)))
            assert finished > 600
            await all_free(llm)
            metrics = llm.metrics()
            assert sum(metrics.requests_finished.values()) == 1000
            assert metrics.requests_finished["length"] >= finished
            assert (metrics.running, metrics.waiting) == (0, 0)

    run(test, debug=False)


EXIT = """
import asyncio, fakes, sys, time
fakes.install()
fakes.Engine.step_seconds = 0.01
from ferrule import AsyncLLM, SamplingParams
llm = AsyncLLM()
async def main():
    stream = llm.stream("x", SamplingParams(ignore_eos=True))
    await anext(stream)
    if sys.argv[1] == "running":
        keep.append(stream)
keep = []
if sys.argv[1] == "running":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
else:
    asyncio.run(main())
    time.sleep(0.1)
print("leaving")
"""


@pytest.mark.parametrize("kind", ["idle", "running"])
def test_exit_is_clean(kind: str) -> None:
    start = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-c", EXIT, kind]
    process = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=20, check=False)
    assert (process.returncode, process.stdout) == (0, "leaving\n"), process.stderr
    assert not process.stderr
    assert time.monotonic() - start < 1 * SLACK + 1


FORK = """
import asyncio, fakes, os, time
fakes.install()
from ferrule import AsyncLLM, SamplingParams, EngineError
params = SamplingParams(max_tokens=3)
llm = AsyncLLM()
async def one():
    async for output in llm.generate("x", params):
        pass
    return output
def in_child(expected):
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(one())
            os._exit(3)
        except EngineError as error:
            os._exit(4 if "forked" in str(error) else 5)
        except BaseException:
            os._exit(6)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == expected, status
in_child(3)
asyncio.run(one())
time.sleep(0.1)
in_child(3)
async def busy():
    fakes.Engine.step_seconds = 0.05
    stream = llm.stream("x", SamplingParams(ignore_eos=True))
    await anext(stream)
    return stream
loop = asyncio.new_event_loop()
stream = loop.run_until_complete(busy())
in_child(4)
loop.run_until_complete(stream.aclose())
loop.run_until_complete(one())
llm.close()
"""


def test_a_forked_child_works_or_says_why_not() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    process = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=20, check=False)
    assert process.returncode == 0, process.stderr
