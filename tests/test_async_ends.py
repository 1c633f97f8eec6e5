"""Ways in which requests of an AsyncLLM end: stop strings, aborts, cancellation, closed event loops."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

import fakes
from event_loop import LONG, all_free, fake_of, last, run, sampled, until
from ferrule import (
    LLM,
    AsyncLLM,
    EngineError,
    InvalidParameterError,
    PromptError,
    RequestOutput,
    SamplingParams,
)
from ferrule._engine.collector import Collector


def test_stop_string_ends_one_of_several_completions(engine: type[fakes.Engine]) -> None:
    with LLM() as plain:
        first, second = (completion.text for completion in plain.generate("x", sampled(300, n=2))[0].outputs)
    engine.step_seconds = 0.05
    stop = next(first[i : i + 4] for i in range(5, 50) if first[i : i + 4] not in second)

    async def test() -> None:
        async with AsyncLLM() as llm:
            task = asyncio.create_task(last(llm.generate("x", sampled(300, n=2, stop=stop))))
            await until(lambda: bool(fake_of(llm).aborted))
            assert len(fake_of(llm).running) == 1, "the engine goes on with what has ended"
            assert not task.done()
            engine.step_seconds = 0
            output = await task
            assert [completion.finish_reason for completion in output.outputs] == ["stop", "length"]
            assert [completion.text for completion in output.outputs] == [first[: first.index(stop)], second]
            await all_free(llm)

    run(test)


def test_abort_before_during_and_after_prefill(engine: type[fakes.Engine]) -> None:
    """Cancels before the request is added, during prefill, during decode, and with n=4."""
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

            # The pause of a step is long where the abort must come before its next event.
            for when, pause in ((at_once, 0.01), (prefilling, 0.05), (streaming, 0.01)):
                engine.step_seconds = pause
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


def test_abort_before_engine_receives_request(engine: type[fakes.Engine]) -> None:
    """Aborts during tokenization, and during a step."""
    gate = engine.gate = threading.Event()

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
            gate.set()
            await beside
            await all_free(llm)
            assert fake_of(llm).next_id == 1

    run(test)


def test_abort_releases_held_back_text(engine: type[fakes.Engine]) -> None:
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


def test_cancellation_at_random_times(engine: type[fakes.Engine]) -> None:
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


def test_leaving_iteration_aborts_request(engine: type[fakes.Engine]) -> None:
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


def test_exception_in_detokenizer_fails_only_its_request(
    engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.step_seconds = 0.001

    async def test() -> None:
        async with AsyncLLM() as llm:
            stream = llm.stream("x", LONG)
            await anext(stream)
            with monkeypatch.context() as patch:
                patch.setattr(llm._tokenizer, "_token_bytes", lambda _: 1 / 0)
                with pytest.raises(EngineError, match="ZeroDivisionError"):
                    await asyncio.wait_for(_rest(stream), 60)
            await all_free(llm)
            await llm.check_health()

    run(test)


async def _rest(stream: AsyncGenerator[Any, None]) -> None:
    async for _ in stream:
        pass


def test_closed_event_loop_aborts_its_requests(engine: type[fakes.Engine]) -> None:
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


def test_requests_of_stopped_event_loop_are_released(engine: type[fakes.Engine]) -> None:
    """A request that ends after its event loop was closed leaves no state, and its id is free."""
    engine.step_seconds = 0.001
    llm = AsyncLLM()
    kept: list[object] = []

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        generator = llm.generate("x", sampled(20), "mine")
        kept.append(generator)
        loop.run_until_complete(anext(generator))
        while fake_of(llm).running:
            time.sleep(0.001)
        loop.close()

    async def test() -> None:
        abandon_elsewhere = partial(asyncio.to_thread, abandon)
        await abandon_elsewhere()
        assert (await last(llm.generate("y", sampled(3), "mine"))).finished
        await all_free(llm)
        await abandon_elsewhere()
        assert not llm._registry.all()
        await all_free(llm)
        beside = asyncio.create_task(last(llm.generate("y", sampled(200))))
        await abandon_elsewhere()
        await asyncio.wait_for(llm.drain(), 60)
        assert (await beside).finished
        await all_free(llm)
        await llm.aclose()

    run(test)


def test_drain_completes_when_event_loop_is_closed(engine: type[fakes.Engine]) -> None:
    async def admit(llm: AsyncLLM) -> None:
        llm._registry.admit(Collector("mine", 1))

    async def test() -> None:
        async with AsyncLLM() as llm:
            loop = asyncio.new_event_loop()
            await asyncio.to_thread(loop.run_until_complete, admit(llm))
            drained = asyncio.create_task(llm.drain())
            await asyncio.sleep(0.01)
            assert not drained.done()
            loop.close()
            await asyncio.wait_for(drained, 60)
            assert not llm._registry._idle

    run(test)


def test_request_rejected_after_its_event_loop_closed(
    engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise InvalidParameterError("n", 0, ">= 1")

    async def begun(llm: AsyncLLM) -> Collector:
        collector = Collector("mine", 1)
        llm._registry.admit(collector)
        collector.begin(llm._request("x", sampled(3), request_id="mine"))
        return collector

    with AsyncLLM() as llm:
        monkeypatch.setattr(engine, "add_request", refuse)
        llm._engine_thread.add(asyncio.run(begun(llm)))

        async def test() -> None:
            await until(lambda: not llm._registry._collectors)

        run(test)


def test_invalid_request_leaves_no_state(engine: type[fakes.Engine]) -> None:
    """No engine thread exists yet that would process the end of the request."""

    async def test() -> None:
        async with AsyncLLM() as llm:
            for _ in range(10):
                with pytest.raises(PromptError):
                    await last(llm.generate(""))
            assert llm._engine_thread._commands.empty()
            assert (await last(llm.generate("x", sampled(3)))).finished
            await all_free(llm)

    run(test)
