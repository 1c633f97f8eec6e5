"""Adapters of requests: names, lists, first use, and errors; on a fake engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from event_loop import LONG, fake_of, last, run, sampled, until
from ferrule import LLM, AsyncLLM, EngineError, InvalidParameterError, LoRARequest, SamplingParams
from lora_files import CONFIG, CONFIG_OF_PEFT

EngineOf = Callable[[LLM], fakes.Engine]
GREEDY = SamplingParams(temperature=0, max_tokens=2)
CHAT = "{{ messages[0].content }}"


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """Two adapters with different ranks."""
    found: dict[str, Path] = {}
    for rank, name in ((4, "a"), (8, "b")):
        found[name] = tmp_path / name
        found[name].mkdir()
        config = {**CONFIG_OF_PEFT, "r": rank, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
        (found[name] / CONFIG).write_text(json.dumps(config))
    return found


@pytest.fixture
def llm(fake_engine: type[fakes.Engine], paths: dict[str, Path]) -> Any:
    with LLM(seed=0, lora_modules=paths) as llm:
        yield llm


def ranks(engine: fakes.Engine) -> list[int | None]:
    """Returns the adapters of all requests so far and clears the list."""
    found = [None if lora is None else lora.rank for lora in engine.loras]
    engine.loras.clear()
    return found


def test_adapter_fields(llm: LLM, paths: dict[str, Path]) -> None:
    first, second = llm.lora_adapters()
    assert (first.name, first.path, first.rank, first.base_model) == ("a", str(paths["a"]), 4, "base")
    assert (first.targets, first.bytes) == (["q_proj", "v_proj"], 1000)
    assert (second.name, second.rank) == ("b", 8)


def test_adapter_still_loading_at_close_is_rejected(llm: LLM, engine_of: EngineOf, paths: dict[str, Path]) -> None:
    adapters, engine = llm._adapters, engine_of(llm)
    load = engine.load_lora

    def meanwhile(directory: str, config: str) -> fakes.LoraAdapter:
        adapters.close()
        return load(directory, config)

    engine.load_lora = meanwhile
    with pytest.raises(EngineError, match="the engine is closed"):
        adapters.load("late", paths["a"])
    assert adapters.all() == []
    assert len(engine.lora_loads) == 3
    with pytest.raises(EngineError, match="the engine is closed"):
        adapters.load("later", paths["a"])
    assert len(engine.lora_loads) == 3, "a closed engine loads nothing"


def test_every_method_accepts_adapter_name(llm: LLM, engine_of: EngineOf) -> None:
    engine = engine_of(llm)
    llm.generate("x", GREEDY)
    llm.generate("x", GREEDY, lora_request="a")
    list(llm.stream("x", GREEDY, lora_request="b"))
    llm.chat([{"role": "user", "content": "x"}], GREEDY, lora_request="a", chat_template=CHAT)
    llm.loglikelihood("x", [" y", " z"], lora_request="b")
    list(llm.explain("x", GREEDY, lora_request="a"))
    llm.next_token_probs("x", lora_request="b")
    assert ranks(engine) == [None, 4, 8, 4, 8, 8, 4, 8]
    llm.generate("x", SamplingParams(n=3, max_tokens=1), lora_request="b")
    assert ranks(engine) == [8, 8, 8]


def test_list_of_adapters_one_for_each_prompt(llm: LLM, engine_of: EngineOf) -> None:
    engine = engine_of(llm)
    llm.generate(["x", "y", "z"], GREEDY, lora_request=["a", None, LoRARequest("b")])
    list(llm.stream_all(["x", "y"], GREEDY, lora_request=[None, "b"]))
    conversation = [{"role": "user", "content": "x"}]
    llm.chat([conversation, conversation], GREEDY, lora_request=["b", "a"], chat_template=CHAT)
    llm.loglikelihood(["x", "y"], [" z", " z"], lora_request=["a", None])
    assert ranks(engine) == [4, None, 8, None, 8, 8, 4, 4, None]
    with pytest.raises(
        InvalidParameterError, match=r"lora_request must be a list of 3, one for each prompt, got \['a', None\]"
    ):
        llm.generate(["x", "y", "z"], GREEDY, lora_request=["a", None])


def test_lora_request_loads_adapter_once(
    fake_engine: type[fakes.Engine], engine_of: EngineOf, paths: dict[str, Path]
) -> None:
    fake_engine.load_lora_seconds = 0.05
    with LLM() as llm:
        adapter = LoRARequest("mine", 1, paths["b"])
        threads = [
            threading.Thread(target=llm.generate, args=("x", GREEDY), kwargs={"lora_request": adapter}) for _ in "1234"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ranks(engine_of(llm)) == [8] * 4
        assert engine_of(llm).lora_loads == [str(paths["b"])]
        assert [adapter.name for adapter in llm.lora_adapters()] == ["mine"]
        llm.generate("x", GREEDY, lora_request="mine")
        with pytest.raises(InvalidParameterError, match="lora_request must be without a path or with"):
            llm.generate("x", GREEDY, lora_request=LoRARequest("mine", lora_path=paths["a"]))


def test_unloaded_adapters_are_rejected_and_names_reusable(
    llm: LLM, engine_of: EngineOf, paths: dict[str, Path]
) -> None:
    llm.unload_lora_adapter("a")
    for ask in ("a", LoRARequest("a")):
        with pytest.raises(
            InvalidParameterError, match=r"lora_request must be the name of a loaded adapter \(loaded: b\), got 'a'"
        ):
            llm.generate("x", GREEDY, lora_request=ask)
    with pytest.raises(
        InvalidParameterError, match=r"lora_name must be the name of a loaded adapter \(loaded: b\), got 'a'"
    ):
        llm.unload_lora_adapter("a")
    assert llm.load_lora_adapter("a", paths["b"]).rank == 8
    llm.generate("x", GREEDY, lora_request="a")
    assert ranks(engine_of(llm)) == [8]
    with pytest.raises(
        InvalidParameterError, match=r"lora_name must be a new name \(this name is loaded from .*, got 'b'"
    ):
        llm.load_lora_adapter("b", paths["a"])


@pytest.mark.parametrize("given", [5, b"a", ("a",), {"a": 1}, True, ""])
def test_invalid_lora_request(llm: LLM, given: Any) -> None:
    with pytest.raises(InvalidParameterError, match="lora_request must be "):
        llm.generate(["x", "y"], GREEDY, lora_request=given)
    with pytest.raises(InvalidParameterError, match="lora_request must be the name of a"):
        llm.stream("x", GREEDY, lora_request=given)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LoRARequest(5), "lora_name must be a string of 1 to 256 characters, got 5"),  # type: ignore[arg-type]
        (lambda: LoRARequest(""), "lora_name must be a string of 1 to 256 characters, got ''"),
        (lambda: LoRARequest("x" * 257), "1 to 256 characters"),
        (lambda: LoRARequest("x", "path"), r"lora_int_id must be an integer \(pass the path as lora_path\)"),  # type: ignore[arg-type]
        (lambda: LoRARequest("x", 1, 5), "lora_path must be a string or a path, got 5"),  # type: ignore[arg-type]
        (lambda: LLM(lora_modules=["a"]), r"lora_modules must be a mapping from adapter"),  # type: ignore[arg-type]
        (lambda: LLM(lora_modules={5: "a"}), "lora_name must be a string of 1 to 256"),  # type: ignore[dict-item]
        (lambda: LLM(lora_modules={"a": 5}), "lora_path must be a string or a path, got 5"),  # type: ignore[dict-item]
    ],
)
def test_invalid_names_and_paths(fake_engine: type[fakes.Engine], make: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says):
        make()


def test_closed_engine_raises(llm: LLM, paths: dict[str, Path]) -> None:
    llm.close()
    assert llm.lora_adapters() == []
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", GREEDY, lora_request="a")
    with pytest.raises(EngineError, match="closed"):
        llm.load_lora_adapter("c", paths["a"])


def test_async_requests_with_adapters(engine: type[fakes.Engine], paths: dict[str, Path]) -> None:
    async def test() -> None:
        async with AsyncLLM(lora_modules={"a": paths["a"]}) as llm:
            assert (await llm.load_lora_adapter("b", paths["b"])).rank == 8
            await last(llm.generate("x", sampled(2), lora_request="a"))
            await last(llm.chat([{"role": "user", "content": "x"}], sampled(2), lora_request="b", chat_template=CHAT))
            assert [delta async for delta in llm.stream("x", sampled(2), lora_request="a")]
            await last(llm.generate("x", sampled(2)))
            assert ranks(fake_of(llm)) == [4, 8, 4, None]
            await llm.unload_lora_adapter("a")
            with pytest.raises(
                InvalidParameterError, match=r"lora_request must be the name of a loaded adapter \(loaded: b\), got 'a'"
            ):
                await last(llm.generate("x", sampled(2), lora_request="a"))
            with pytest.raises(
                InvalidParameterError, match=r"lora_name must be the name of a loaded adapter \(loaded: b\), got 'a'"
            ):
                await llm.unload_lora_adapter("a")

    run(test)


def test_loading_blocks_neither_event_loop_nor_engine(
    engine: type[fakes.Engine], paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.step_seconds = 0.005
    begun, go_on, load = threading.Event(), threading.Event(), engine.load_lora

    def held(self: fakes.Engine, directory: str, config: str) -> Any:
        begun.set()
        assert go_on.wait(60)
        return load(self, directory, config)

    monkeypatch.setattr(engine, "load_lora", held)

    async def test() -> None:
        async with AsyncLLM() as llm:
            running = asyncio.create_task(last(llm.generate("x", LONG)))
            await until(lambda: bool(fake_of(llm).running))
            waiting = asyncio.create_task(
                last(llm.generate("y", sampled(2), lora_request=LoRARequest("a", 1, paths["a"])))
            )
            await until(begun.is_set)
            before = fake_of(llm).steps
            await until(lambda: fake_of(llm).steps > before + 20)
            assert not fake_of(llm).lora_loads
            go_on.set()
            await waiting
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(test)
