"""Texts that are much longer than a model's context: counted in pieces, and refused before they are tokenized whole."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from ferrule import LLM, AsyncLLM, PromptError
from ferrule._cancellation import raise_if_cancelled
from ferrule._engine import workers
from ferrule._engine.workers import LARGE_INPUT, LARGE_WORKERS, WORKERS, Workers, input_size, workers_for
from ferrule._text import tokenizer as module
from ferrule._text.tokenizer import LONG_TEXT, Tokenizer, TokenLimit
from word_tokenizer import write_word_tokenizer

BYTE_LEVEL = Tokenizer(TINY)
SENTENCE = "The capital of France is Paris, as everyone knows. "
LIMIT = TokenLimit(100, "the text has {found} tokens, more than the limit of 100")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the length of each text that is encoded."""
    lengths: list[int] = []
    encode = Tokenizer._encode

    def counting(self: Tokenizer, text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "_encode", counting)
    return lengths


def test_a_text_that_surely_exceeds_the_limit_is_refused_after_one_piece(encoded: list[int]) -> None:
    with pytest.raises(PromptError, match=r"^the text has at least [0-9]{5} tokens, more than the limit of 100$"):
        BYTE_LEVEL.encode(SENTENCE * 100_000, limit=LIMIT)
    assert encoded == [LONG_TEXT]


def test_a_text_near_the_limit_is_tokenized_whole(encoded: list[int]) -> None:
    text = SENTENCE * 3000
    tokens = len(BYTE_LEVEL.encode(text))
    for limit in (tokens, tokens - 1):
        assert len(BYTE_LEVEL.encode(text, limit=TokenLimit(limit, "{found}"))) == tokens
    assert encoded.count(len(text)) == 3


@pytest.mark.parametrize("text", ["x" * (LONG_TEXT * 20), " \n" * (LONG_TEXT * 10)], ids=["one word", "white space"])
def test_a_long_text_of_few_tokens_is_not_refused(text: str, tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path)
    tokens = Tokenizer(tmp_path).encode(text, limit=TokenLimit(3, "{found}"))
    assert len(tokens) <= 3


def test_a_lone_surrogate_in_a_long_text_is_named_with_its_position() -> None:
    with pytest.raises(PromptError, match=r"U\+D800, at character 70000"):
        BYTE_LEVEL.encode("a" * 70_000 + "\ud800", limit=TokenLimit(1 << 20, "{found}"))


@pytest.mark.parametrize("most", [1, 100, 20_000])
def test_truncation_of_a_long_text_encodes_its_beginning(most: int, encoded: list[int]) -> None:
    text = SENTENCE * 20_000
    kept, _ = BYTE_LEVEL.encode_text(text, most=most)
    assert max(encoded) < len(text) / 3
    assert kept == BYTE_LEVEL.encode(text)[:most]


def test_generate_and_chat_refuse_a_long_prompt_early(llm: LLM, encoded: list[int]) -> None:
    text = SENTENCE * 100_000
    message = r"the prompt has at least [0-9]+ tokens, more than the limit of 2047: max_model_len allows 2048 tokens"
    with pytest.raises(PromptError, match=message):
        llm.generate(text)
    with pytest.raises(PromptError, match=message):
        llm.chat([{"role": "user", "content": text}])
    with pytest.raises(PromptError, match=r"the text has at least [0-9]+ tokens"):
        llm.embed(text)
    assert sum(encoded) <= 3 * LONG_TEXT


def test_cancelled_work_ends_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    pool = Workers(1)
    counted: list[int] = []

    def work() -> None:
        try:
            for end, _ in BYTE_LEVEL._counts(SENTENCE * 20_000):
                counted.append(end)
                begun.set()
                assert go_on.wait(60)
        finally:
            ended.set()

    async def cancel() -> None:
        task = asyncio.ensure_future(pool.run(work))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(cancel())
    assert ended.wait(60)
    assert counted == [LONG_TEXT]


def test_work_outside_of_workers_is_not_cancelled() -> None:
    raise_if_cancelled()


def test_large_inputs_have_their_own_threads() -> None:
    assert workers_for() is workers_for(LARGE_INPUT - 1) is WORKERS
    assert workers_for(LARGE_INPUT) is LARGE_WORKERS

    async def request() -> None:
        input_size.set(LARGE_INPUT)
        assert workers_for() is LARGE_WORKERS

    asyncio.run(request())
    assert workers_for() is WORKERS


@pytest.mark.usefixtures("fake_engine")
def test_long_prompts_do_not_delay_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten long prompts occupy every thread for large inputs; a short one that also needs a thread is answered."""
    go_on = threading.Event()
    monkeypatch.setattr(module, "raise_if_cancelled", lambda: go_on.wait(60))
    monkeypatch.setattr(workers, "LARGE_INPUT", 100_000)

    async def attack() -> None:
        async with AsyncLLM() as llm:
            attackers = [asyncio.ensure_future(anext(llm.generate(SENTENCE * 4000))) for _ in range(10)]
            await asyncio.sleep(0.1)
            async for _ in llm.generate(SENTENCE * 100):
                pass
            assert not any(attacker.done() for attacker in attackers)
            go_on.set()
            for attacker in attackers:
                with pytest.raises(PromptError, match="at least"):
                    await attacker

    asyncio.run(attack())
