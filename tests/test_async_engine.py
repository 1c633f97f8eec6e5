"""AsyncLLM with many clients, and log-likelihoods, on the real engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator

import numpy as np
import pytest

from ferrule import LLM, AsyncLLM, QueueFullError, RequestOutput, RequestOutputKind, SamplingParams
from ferrule._engine.driver import Work

pytestmark = pytest.mark.native

CLIENTS = 48
PROMPTS = [f"Once upon a time there were {number} kings" + " and a queen" * (number % 7) for number in range(CLIENTS)]


def params(number: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=number, max_tokens=8 + number % 30, ignore_eos=True, n=n)


async def last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return [output async for output in outputs][-1]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Returns the output of each client from an engine without other requests."""
    with LLM(threads=2) as llm:
        outputs = [llm.generate(prompt, params(number))[0] for number, prompt in enumerate(PROMPTS)]
    return [output.outputs[0].token_ids for output in outputs]


def test_concurrent_requests_equal_solo_outputs(alone: list[list[int]]) -> None:
    async def clients() -> list[list[int]]:
        async with AsyncLLM(threads=2) as llm:
            work = (last(llm.generate(prompt, params(number))) for number, prompt in enumerate(PROMPTS))
            return [output.outputs[0].token_ids for output in await asyncio.gather(*work)]

    assert asyncio.run(clients()) == alone


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_steps_are_short_only_for_readers_of_each_token(kind: RequestOutputKind, submitted: list[Work]) -> None:
    async def ask() -> RequestOutput:
        async with AsyncLLM(threads=1) as llm:
            return await last(llm.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True, output_kind=kind)))

    assert asyncio.run(ask()).finished
    assert [json.loads(work.params)["streams"] for work in submitted] == [kind is not RequestOutputKind.FINAL_ONLY]


def test_cancelled_requests_free_pages_and_do_not_change_others(alone: list[list[int]]) -> None:
    generator = random.Random(5)

    async def client(llm: AsyncLLM, number: int) -> None:
        await asyncio.sleep(generator.random() / 4)
        try:
            if generator.random() < 0.4:
                async with asyncio.timeout(generator.random() / 20):
                    await last(llm.generate(PROMPTS[number], params(number, n=generator.choice([1, 4]))))
            else:
                output = await last(llm.generate(PROMPTS[number], params(number)))
                assert output.outputs[0].token_ids == alone[number]
        except (TimeoutError, QueueFullError):
            pass

    async def clients() -> None:
        # The KV cache is small, so requests wait, are refused, and are preempted.
        async with AsyncLLM(threads=2, kv_cache_memory=2_000_000, max_queued_requests=40) as llm:
            await asyncio.gather(*(client(llm, number % CLIENTS) for number in range(4 * CLIENTS)))
            await last(llm.generate("x", params(1)))  # after this call every abort has been processed
            metrics = llm.metrics()
            assert (metrics.running, metrics.waiting) == (0, 0)
            assert metrics.pages_free == metrics.pages_total
            assert metrics.requests_finished["abort"] > 0
            await llm.drain(0)

    asyncio.run(clients(), debug=True)


def test_loglikelihood_equals_log_softmax_of_logits() -> None:
    with LLM(threads=2, quantization="f32") as llm:
        prompt = llm.tokenize("The capital of France is")
        texts = [" Paris", " Rome, of course", " the the the"]
        for text, score in zip(texts, llm.loglikelihood("The capital of France is", texts), strict=True):
            ids = llm.tokenize(text, add_special_tokens=False)
            rows = llm.logits([*prompt, *ids]).astype(np.float64)[len(prompt) - 1 : -1]
            logprobs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
            assert score.token_ids == ids
            assert score.token_logprobs == pytest.approx(
                [row[i] for row, i in zip(logprobs, ids, strict=True)], abs=1e-4
            )
            assert score.is_greedy == all(row.argmax() == i for row, i in zip(logprobs, ids, strict=True))
