"""Adapters that are loaded when a request first needs them, on a fake engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import fakes
from event_loop import run
from ferrule import AsyncLLM, InsufficientMemoryError
from ferrule.ray.adapters import MultiplexedModels
from ferrule.server.errors import ApiError
from lora_files import CONFIG, CONFIG_OF_PEFT

NAMES = ("a", "b", "c")


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Three adapters, and one whose files are missing."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        config = {**CONFIG_OF_PEFT, "r": 4, "lora_alpha": 8, "target_modules": ["v_proj"]}
        (tmp_path / name / CONFIG).write_text(json.dumps(config))
    return {name: str(tmp_path / name) for name in (*NAMES, "missing")}


def models_of(llm: AsyncLLM, paths: dict[str, str], max_loaded: int | None = None) -> MultiplexedModels:
    return MultiplexedModels(("tiny",), llm, paths, max_loaded=max_loaded, listed=("tiny", *paths))


def loaded(llm: AsyncLLM) -> list[str]:
    return sorted(adapter.name for adapter in llm.lora_adapters())


def test_adapters_are_loaded_at_their_first_use(engine: type[fakes.Engine], paths: dict[str, str]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            models = models_of(llm, paths)
            names = [(each.name, each.adapter) for each in models.all()]
            assert names == [("tiny", None), *((name, name) for name in paths)]
            async with models.lease(None) as served:
                assert (served.name, served.adapter, loaded(llm)) == ("tiny", None, [])
            async with models.lease("b") as served:
                assert (served.name, served.adapter, loaded(llm)) == ("b", "b", ["b"])
                served.check_loaded()
            assert [(each.name, each.adapter) for each in models.all()] == names
            assert loaded(llm) == ["b"]

    run(test)


def test_least_recently_used_idle_adapter_is_unloaded(engine: type[fakes.Engine], paths: dict[str, str]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            models = models_of(llm, paths, max_loaded=2)
            for name in "aba":
                async with models.lease(name):
                    pass
            async with models.lease("c"):
                assert loaded(llm) == ["a", "c"]
                async with models.lease("a"), models.lease("b"):  # adapters in use exceed the limit
                    assert loaded(llm) == ["a", "b", "c"]
                assert loaded(llm) == ["a", "c"]  # the first that became idle
            assert loaded(llm) == ["a", "c"]

    run(test)


def test_requests_share_a_load_which_outlives_them(engine: type[fakes.Engine], paths: dict[str, str]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            models = models_of(llm, paths)
            asked, proceed, loads = asyncio.Event(), asyncio.Event(), 0
            load = llm.load_lora_adapter

            async def slow(name: str, path: str) -> object:
                nonlocal loads
                loads += 1
                asked.set()
                await proceed.wait()
                return await load(name, path)

            llm.load_lora_adapter = slow  # pyright: ignore[reportAttributeAccessIssue]

            async def use() -> None:
                async with models.lease("a"):
                    assert loaded(llm) == ["a"]

            first, second = asyncio.create_task(use()), asyncio.create_task(use())
            await asked.wait()
            first.cancel()
            await asyncio.wait([first])
            proceed.set()
            await second
            assert (first.cancelled(), loads) == (True, 1)

    run(test)


def test_adapter_that_cannot_be_loaded_is_an_error(engine: type[fakes.Engine], paths: dict[str, str]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            models = models_of(llm, paths)
            for _ in range(2):  # it is tried again
                with pytest.raises(ApiError, match="missing could not be loaded: ") as error:
                    async with models.lease("missing"):
                        pass
                assert (error.value.status_code, error.value.code) == (500, "model_load_failed")
            with pytest.raises(ApiError, match="unknown model 'd'; choose one of: tiny, a, b, c, missing"):
                async with models.lease("d"):
                    pass

    run(test)


def test_idle_adapters_make_room(engine: type[fakes.Engine], paths: dict[str, str]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            models = models_of(llm, paths)
            load = llm.load_lora_adapter

            async def limited(name: str, path: str) -> object:
                if loaded(llm):
                    raise InsufficientMemoryError("full")
                return await load(name, path)

            llm.load_lora_adapter = limited  # pyright: ignore[reportAttributeAccessIssue]
            async with models.lease("a"):
                pass
            async with models.lease("b"):
                assert loaded(llm) == ["b"]
                with pytest.raises(ApiError, match="c could not be loaded: full"):
                    async with models.lease("c"):
                        pass

    run(test)
