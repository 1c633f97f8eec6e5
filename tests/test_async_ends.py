"""How requests of an AsyncLLM end, and it itself: FAULTS rows 69, 72, 73, 75 and 81, as far as Python has a part."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from event_loop import LONG, SLACK, all_free, fake_of, last, run, sampled, until
from ferrule import (
    LLM,
    AsyncLLM,
    EngineError,
    InvalidParameterError,
    RequestOutput,
    SamplingParams,
)

TESTS = Path(__file__).parent


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
