"""AsyncLLM ends by failures of the engine, by draining and closing, and with its process."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import fakes
from event_loop import LONG, SLACK, all_free, fake_of, last, run, sampled, until
from ferrule import LLM, AsyncLLM, EngineError, InvalidParameterError
from ferrule._loading import packed_cache

TESTS = Path(__file__).parent


def test_engine_death_fails_every_request(engine: type[fakes.Engine]) -> None:
    engine.dies_at = 5
    engine.step_seconds = 0.001

    async def test() -> None:
        async with AsyncLLM() as llm:
            await llm.check_health()
            tasks = [asyncio.create_task(last(llm.generate(f"x {i}", LONG))) for i in range(5)]
            start = time.monotonic()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [EngineError] * 5
            # Some get the error from the failed step, others when they are added after it.
            said = {str(result) for result in results}
            assert said <= {"the engine died: a worker panicked", "the engine is dead: a worker panicked"}
            with pytest.raises(EngineError, match="the engine is dead: a worker panicked"):
                await llm.check_health()
            assert time.monotonic() - start < 2 * SLACK
            with pytest.raises(EngineError, match="the engine is dead"):
                await last(llm.generate("x"))

    run(test)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_exception_in_engine_thread_fails_every_request(
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


def test_drain_waits_for_running_requests(engine: type[fakes.Engine]) -> None:
    gate = threading.Event()

    async def test() -> None:
        async with AsyncLLM() as llm:
            await llm.drain(0)
        engine.gate = gate
        async with AsyncLLM() as llm:
            tasks = [asyncio.create_task(last(llm.generate("x", sampled(40)))) for _ in range(3)]
            await until(lambda: len(llm._registry.all()) == 3)
            drained = asyncio.create_task(llm.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="the engine is draining and accepts no new requests"):
                await last(llm.generate("x"))
            await llm.check_health()
            assert not drained.done()
            gate.set()
            await drained
            assert [(await task).outputs[0].finish_reason for task in tasks] == ["length"] * 3
            with pytest.raises(InvalidParameterError, match=r"timeout must be a number from 0 to 1e\+09, got -1"):
                await llm.drain(-1)

    run(test)


def test_drain_aborts_requests_after_timeout(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.002

    async def test() -> None:
        async with AsyncLLM() as llm:
            running, unread = [llm.generate("x", LONG) for _ in range(3)], llm.stream("x", LONG)
            await asyncio.gather(*map(anext, running), anext(unread))
            tasks = [asyncio.create_task(last(outputs)) for outputs in running]
            await llm.drain(0.05)
            outputs = [(await task).outputs[0] for task in tasks]
            assert [output.finish_reason for output in outputs] == ["abort"] * 3
            assert all(output.token_ids for output in outputs)
            assert [delta async for delta in unread][-1].output is not None
            await all_free(llm)

    run(test)


def test_aclose_ends_running_requests(engine: type[fakes.Engine]) -> None:
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


def test_close_of_unused_engine_and_without_event_loop(engine: type[fakes.Engine]) -> None:
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


def test_garbage_collected_async_llm_ends_engine_thread(engine: type[fakes.Engine]) -> None:
    llm = AsyncLLM()
    asyncio.run(last(llm.generate("x", sampled(3))))  # type: ignore[arg-type]
    thread, gone = llm._engine_thread._thread, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_two_event_loops_in_two_threads(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.01
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
        thread.join(60)
    assert [results[i].outputs for i in range(8)] == expected
    assert not llm._registry.all()
    llm.close()


EXIT = """
import asyncio, fakes, sys, time
fakes.install()
fakes.Engine.step_seconds = 0.1  # a whole answer takes minutes
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
def test_process_exit_is_clean(kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", EXIT, kind]
    process = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout) == (0, "leaving\n"), process.stderr
    assert not process.stderr


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


def test_forked_child_works_or_raises() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    process = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("closes", ["close", "aclose", "shutdown"])
def test_closing_releases_packed_files(
    closes: str, engine: type[fakes.Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed.safetensors"
    packed.touch()
    monkeypatch.setattr("ferrule._api.loaded.weights_of", lambda *_: packed)
    llm = AsyncLLM()
    assert packed_cache._held[packed] == 1
    closed = getattr(llm, closes)()
    if closed is not None:
        asyncio.run(closed)
    assert packed not in packed_cache._held
