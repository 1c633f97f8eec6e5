"""Loading and unloading adapters while an engine runs, and the effect on its caches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from event_loop import last, run
from ferrule import LLM, AsyncLLM, InvalidParameterError, LoRARequest, SamplingParams
from ferrule._text.prompt import TokensPrompt
from lora_files import random_adapter
from test_invariance import bits

pytestmark = pytest.mark.native

PROMPT: TokensPrompt = {"prompt_token_ids": list(range(7, 107))}
PAGES = 96
"""Tokens of PROMPT in whole pages."""


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: random_adapter(folder / name, TINY, seed=seed) for seed, name in enumerate("abc")}


def params(length: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=3, max_tokens=length, logprobs=3, ignore_eos=True)


def result_of(output: Any) -> Any:
    return bits(output.outputs[0])


def test_load_and_unload_during_running_requests(paths: dict[str, Path]) -> None:
    names: list[str | None] = [None, "a", "b", "c"]
    with LLM(lora_modules=paths) as llm:
        alone = {name: result_of(llm.generate(PROMPT, params(200), lora_request=name)[0]) for name in names}
    assert len({str(result) for result in alone.values()}) == 4

    async def test() -> None:
        async with AsyncLLM(lora_modules={"a": paths["a"], "b": paths["b"]}) as llm:
            deltas = {name: llm.stream(PROMPT, params(200), lora_request=name) for name in (None, "a", "b")}
            got = {name: (await anext(stream)).token_ids for name, stream in deltas.items()}
            await llm.unload_lora_adapter("a")
            loaded, refused = await asyncio.gather(
                llm.load_lora_adapter("c", paths["c"]),
                last(llm.generate(PROMPT, params(), lora_request="a")),
                return_exceptions=True,
            )
            assert not isinstance(loaded, BaseException)
            assert isinstance(refused, InvalidParameterError)
            deltas["c"] = llm.stream(PROMPT, params(200), lora_request="c")
            got["c"] = []
            for name, stream in deltas.items():
                got[name] += [token async for delta in stream for token in delta.token_ids]
                assert got[name] == [token for token, _ in alone[name]]
            assert [adapter.name for adapter in llm.lora_adapters()] == ["b", "c"]

    run(test)


def test_requests_during_adapter_churn(paths: dict[str, Path]) -> None:
    with LLM(lora_modules=paths) as llm:
        alone = {name: result_of(llm.generate(PROMPT, params(), lora_request=name)[0]) for name in paths}

    async def test() -> None:
        async with AsyncLLM(max_num_seqs=4) as llm:
            done = asyncio.Event()

            async def churn() -> None:
                """Unloads adapters repeatedly; the next request loads them again."""
                while not done.is_set():
                    await asyncio.sleep(0.002)
                    for adapter in llm.lora_adapters():
                        await llm.unload_lora_adapter(adapter.name)

            async def ask(number: int) -> None:
                name = "abc"[number % 3]
                output = await last(llm.generate(PROMPT, params(), lora_request=LoRARequest(name, 1, paths[name])))
                assert result_of(output) == alone[name]

            churning = asyncio.create_task(churn())
            for first in range(0, 60, 12):
                await asyncio.gather(*map(ask, range(first, first + 12)))
            done.set()
            await churning

    run(test)


def test_prefix_cache_is_keyed_by_adapter_contents(paths: dict[str, Path], tmp_path: Path) -> None:
    def cached(llm: LLM, name: str | None) -> int | None:
        return llm.generate(PROMPT, params(), lora_request=name)[0].num_cached_tokens

    for restarted in (False, True):
        with LLM(lora_modules=paths, prefix_cache_dir=tmp_path / "pages") as llm:
            found = PAGES if restarted else 0
            assert [cached(llm, name) for name in ("a", "b", None)] == [found] * 3
            llm.unload_lora_adapter("a")
            llm.load_lora_adapter("other name", paths["a"])
            llm.load_lora_adapter("a", paths["c"])
            assert cached(llm, "other name") == PAGES
            assert cached(llm, "a") == found
            assert cached(llm, "c") == PAGES


def test_saved_state_belongs_to_its_adapter(paths: dict[str, Path]) -> None:
    with LLM(lora_modules=paths) as llm:
        state = llm.save_state(PROMPT, lora_request="a")
        expected = result_of(llm.generate(PROMPT, params(), lora_request="a")[0])
    with LLM(lora_modules={"again": paths["a"], "b": paths["b"]}) as llm:
        assert llm.restore_state(state) == PROMPT
        for name, found in (("b", 0), (None, 0), ("again", PAGES)):
            output = llm.generate(PROMPT, params(), lora_request=name)[0]
            assert output.num_cached_tokens == found
            assert (result_of(output) == expected) == (name == "again")


def test_logits_and_loglikelihood_use_the_adapter(paths: dict[str, Path]) -> None:
    ids = list(PROMPT["prompt_token_ids"])
    with LLM(lora_modules=paths) as llm:
        logits = {name: llm.logits(ids, lora_request=name) for name in ("a", "b", None)}
        assert not (logits["a"] == logits["b"]).all()
        assert not (logits["a"] == logits[None]).all()
        scores = [llm.loglikelihood(PROMPT, [[5, 6]], lora_request=name)[0].logprob for name in ("a", "b", None)]
        assert len(set(scores)) == 3
        assert llm.loglikelihood([PROMPT] * 3, [[5, 6]] * 3, lora_request=["a", "b", None])[0].logprob == scores[0]
