"""Many concurrent clients: each output equals that of a single request, and no resources leak."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from ferrule import LLM, AsyncLLM, SamplingParams
from ferrule._engine.driver import Work
from server.live import Live, serving, until

pytestmark = pytest.mark.native

CLIENTS, REQUESTS, TOKENS = 64, 200, 24
SLOW_REQUESTS = 500 if os.environ.get("FERRULE_SLOW") else REQUESTS
"""Number of requests of the longest test; CI sets FERRULE_SLOW."""
PROMPTS = [f"{index * 7919} The canary of request {index} is" for index in range(50)]


@pytest.fixture(scope="module")
def solo() -> list[str]:
    """Continuation of each prompt without other requests."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM() as llm:
        return [llm.generate(prompt, params)[0].outputs[0].text for prompt in PROMPTS]


async def run(live: Live, solo: list[str], leave: float, requests: int = REQUESTS) -> tuple[int, int]:
    """Returns the number of complete and of disconnected clients; each got the right text so far."""
    numbers = random.Random(0)
    turns = iter(range(requests))
    complete, left = 0, 0

    async def client(api: openai.AsyncOpenAI) -> None:
        nonlocal complete, left
        for turn in turns:
            which = turn % len(PROMPTS)
            stays = numbers.randrange(1, 5) if numbers.random() < leave else None
            text = ""
            stream = await api.completions.create(
                model="tiny",
                prompt=PROMPTS[which],
                temperature=0,
                max_tokens=TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async with stream:
                async for chunk in stream:
                    text += chunk.choices[0].text
                    if stays is not None and (stays := stays - 1) == 0:
                        break
            if stays == 0:
                left += 1
                assert solo[which].startswith(text)
            else:
                complete += 1
                assert text == solo[which]

    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120) as api:
        await asyncio.gather(*(client(api) for _ in range(CLIENTS)))
    return complete, left


def free(live: Live) -> bool:
    metrics = live.llm.metrics()
    return metrics.running == metrics.waiting == 0 and metrics.pages_free == metrics.pages_total


def test_concurrent_requests_equal_solo_outputs(tiny: Live, solo: list[str]) -> None:
    assert len(set(solo)) > len(solo) / 2  # canaries that are all alike would tell nothing
    assert asyncio.run(run(tiny, solo, leave=0, requests=SLOW_REQUESTS)) == (SLOW_REQUESTS, 0)
    until(lambda: free(tiny))


def test_disconnects_do_not_change_other_outputs(tiny: Live, solo: list[str]) -> None:
    complete, left = asyncio.run(run(tiny, solo, leave=0.3))
    assert complete + left == REQUESTS
    assert left > REQUESTS / 10
    until(lambda: free(tiny))


def test_preemption_does_not_change_outputs(solo: list[str]) -> None:
    """With a quarter of the KV cache needed, requests are preempted and no output changes."""
    with LLM() as llm:
        longest = max(len(llm.tokenize(prompt)) for prompt in PROMPTS) + TOKENS + 1
        wanted = CLIENTS * longest * llm.info()["kv_bytes_per_token"]
    with serving(llm=lambda: AsyncLLM(kv_cache_memory=wanted // 4, max_model_len=longest)) as live:
        assert asyncio.run(run(live, solo, leave=0)) == (REQUESTS, 0)
        assert live.llm.info()["kv_cache_tokens"] < CLIENTS * longest / 2
        until(lambda: free(live))


def test_queue_overflow_rejects_without_changing_other_outputs(solo: list[str]) -> None:
    """With ten times as many clients as places, some are rejected and the others are not affected."""
    room = 4
    together = threading.Barrier(10 * room)
    with serving(llm=lambda: AsyncLLM(max_num_seqs=2, max_queued_requests=room - 2)) as live:

        def ask(which: int) -> bool:
            together.wait()
            found = live.complete(PROMPTS[which], temperature=0, max_tokens=TOKENS, ignore_eos=True)
            if found.status == 200:
                assert found.json["choices"][0]["text"] == solo[which]
                return True
            assert (found.status, found.error["code"]) == (503, "queue_full")
            assert int(found.headers["Retry-After"]) > 0
            return False

        with ThreadPoolExecutor(10 * room) as clients:
            answered = list(clients.map(ask, range(10 * room)))
        assert answered.count(True) >= room
        assert answered.count(False) >= room
        until(lambda: free(live))


@pytest.mark.parametrize("stream", [False, True])
def test_steps_are_short_only_for_streams(tiny: Live, stream: bool, submitted: list[Work]) -> None:
    assert tiny.complete("Once", max_tokens=2, stream=stream).status == 200
    assert [json.loads(work.params)["streams"] for work in submitted] == [stream]
