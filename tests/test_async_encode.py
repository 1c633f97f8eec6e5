"""AsyncLLM embeds in portions between the engine's steps; waits are short, and errors affect only their caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import fakes
from event_loop import LONG, all_free, fake_of, last, run, sampled, until
from ferrule import LLM, AsyncLLM, EngineError, PromptError, QueueFullError, UnsupportedTaskError
from ferrule._text.prompt import TokensPrompt
from test_encoders import GOLDEN


def texts(count: int, tokens: int = 100) -> list[TokensPrompt]:
    """A text length of which five fit the 512 tokens of a step."""
    return [{"prompt_token_ids": [7 + number % 4000] * tokens} for number in range(count)]


def test_results_equal_llm(engine: type[fakes.Engine]) -> None:
    with LLM() as plain:
        embedded = plain.embed(["The cat", "The dog"], dimensions=8)
        hidden = plain.embed(["The cat", "The dog barks"], pooling="none")
        ranked = plain.rerank("The cat", ["The dog", "A cat"])

    async def test() -> None:
        async with AsyncLLM() as llm:
            found = await llm.embed(["The cat", "The dog"], dimensions=8)
            assert [o.outputs.embedding.tolist() for o in found] == [o.outputs.embedding.tolist() for o in embedded]
            found = await llm.embed(["The cat", "The dog barks"], pooling="none")
            assert [o.outputs.embedding.tolist() for o in found] == [o.outputs.embedding.tolist() for o in hidden]
            assert await llm.rerank("The cat", ["The dog", "A cat"]) == ranked
            assert await llm.embed([]) == []
            with pytest.raises(UnsupportedTaskError, match="tiny has no classifier"):
                await llm.classify("x")
            assert not (await llm.embed(["x", ""], dimensions=8))[1].outputs.embedding.any()
            assert [o.prompt_token_ids for o in await llm.embed(["", ""])] == [[], []]
            with pytest.raises(PromptError, match=r"prompts\[1\]: the prompt has no tokens"):
                await llm.embed(["x", {"prompt_token_ids": []}])
        async with AsyncLLM(GOLDEN / "bert_classifier") as llm:
            assert len(await llm.classify({"prompt_token_ids": [5]})) == 1

    run(test)


def test_encoding_batches_run_between_steps(engine: type[fakes.Engine]) -> None:
    """Generation continues while many texts are embedded."""
    engine.step_seconds = 0.005

    async def test() -> None:
        async with AsyncLLM() as llm:
            embedding = asyncio.ensure_future(llm.embed(texts(2000)))
            await until(lambda: bool(fake_of(llm).encoded))
            before = len(fake_of(llm).encoded)
            output = await last(llm.generate("x", sampled(5)))
            assert len(output.outputs[0].token_ids) == 5
            assert len(fake_of(llm).encoded) >= before + 4
            assert not embedding.done()
            embedding.cancel()
            await all_free(llm)

    run(test)


async def queue_calls(llm: AsyncLLM, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Returns the results of calls that are all queued while the engine is busy."""
    gate = fake_of(llm).gate = threading.Event()
    first = asyncio.ensure_future(llm.embed(texts(1)))
    await until(lambda: fake_of(llm).stepping)
    answers = asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: len(llm._engine_thread._encodes) == len(calls))
    gate.set()
    await first
    return await answers


def test_calls_with_equal_parameters_share_a_batch(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            same = [llm.embed(text) for text in texts(5)]
            answers = await queue_calls(llm, [*same, llm.embed(texts(1)[0], pooling="mean")])
            sizes = [len(given) for given, _ in fake_of(llm).encoded]
            assert sorted(sizes) == [1, 1, 5]
            with LLM() as plain:
                expected = [plain.embed(text)[0] for text in texts(5)]
            found = [answer[0].outputs.embedding.tolist() for answer in answers[:5]]
            assert found == [output.outputs.embedding.tolist() for output in expected]

    run(test)


def test_error_fails_only_the_call_of_its_text(engine: type[fakes.Engine]) -> None:
    engine.bad_prompt = [9] * 100

    async def test() -> None:
        async with AsyncLLM() as llm:
            answers = await queue_calls(llm, [llm.embed(text) for text in texts(5)])
            assert len(fake_of(llm).encoded) == 1 + 1 + 5
            assert [isinstance(answer, EngineError) for answer in answers] == [False, False, True, False, False]
            await llm.check_health()
            assert len(await llm.embed(texts(2))) == 2

    run(test)


def test_cancelled_task_stops_encoding(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.005

    async def test() -> None:
        async with AsyncLLM() as llm:
            task = asyncio.ensure_future(llm.embed(texts(500)))
            await until(lambda: len(fake_of(llm).encoded) >= 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            calls = len(fake_of(llm).encoded)
            await llm.embed(texts(1))
            assert len(fake_of(llm).encoded) <= calls + 2
            assert llm._registry._encodings == 0

    run(test)


def test_drain_waits_for_texts_and_rejects_new_ones(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.005

    async def test() -> None:
        llm = AsyncLLM()
        task = asyncio.ensure_future(llm.embed(texts(20)))
        await until(lambda: bool(fake_of(llm).encoded))
        await llm.drain()
        assert llm._registry._encodings == 0
        assert len(await task) == 20
        with pytest.raises(EngineError, match="draining"):
            await llm.embed("x")
        await llm.aclose()

    run(test)


def test_drain_stops_waiting_after_timeout(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.02

    async def test() -> None:
        llm = AsyncLLM()
        task = asyncio.ensure_future(llm.embed(texts(5000)))
        await until(lambda: bool(fake_of(llm).encoded))
        await llm.drain(0.05)
        with pytest.raises(EngineError, match="drained"):
            await task
        await llm.aclose()

    run(test)


@pytest.mark.parametrize("close", [lambda llm: llm.aclose(), lambda llm: asyncio.to_thread(llm.close)])
def test_close_fails_waiting_calls(close: Callable[[AsyncLLM], Any], engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.005

    async def test() -> None:
        llm = AsyncLLM()
        tasks = [asyncio.ensure_future(llm.embed(texts(500))) for _ in range(3)]
        await until(lambda: bool(fake_of(llm).encoded))
        await close(llm)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(answer) for answer in answers] == ["the engine is closed"] * 3
        with pytest.raises(EngineError, match="the engine is closed"):
            await llm.embed("x")

    run(test)


def test_dead_engine_is_detected(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        llm = AsyncLLM()
        await llm.embed("x")
        fake_of(llm).dead = True
        with pytest.raises(EngineError, match="dead"):
            await llm.embed("x")
        await until(lambda: not llm._engine_thread.alive)
        with pytest.raises(EngineError, match="dead"):
            await llm.check_health()
        with pytest.raises(EngineError, match="dead"):
            await last(llm.generate("x", LONG))
        await llm.aclose()

    run(test)


def test_full_queue_rejects_encoding_calls(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.01

    async def test() -> None:
        async with AsyncLLM(max_num_seqs=1, max_queued_requests=2) as llm:
            tasks = [asyncio.ensure_future(llm.embed(texts(1))) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match=r"the request queue is full \(3 encoding calls;"):
                await llm.embed("x")
            assert llm.metrics().requests_refused == 1
            await asyncio.gather(*tasks)
            assert len(await llm.embed("x")) == 1

    run(test)


def test_closed_event_loop_does_not_break_engine(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.005
    llm = AsyncLLM()

    async def leave() -> None:
        task = asyncio.ensure_future(llm.embed(texts(50)))
        await until(lambda: bool(fake_of(llm).encoded))
        task.cancel()

    asyncio.run(leave())

    async def test() -> None:
        assert len(await llm.embed(texts(2))) == 2
        await llm.drain()
        await llm.aclose()

    run(test)
