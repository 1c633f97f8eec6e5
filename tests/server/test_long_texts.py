"""Long texts over HTTP: refused early, in separate threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ferrule._engine import workers
from ferrule._text import tokenizer
from ferrule.server.openai.prompts import MIN_TEXT_LIMIT
from server.live import Live, until


def test_long_bodies_do_not_delay_short_conversations(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(tokenizer, "raise_if_cancelled", lambda: go_on.wait(60))
    long = {"messages": [{"role": "user", "content": "Say it again. " * 30_000}]}
    with ThreadPoolExecutor(10) as pool:
        attackers = [pool.submit(live.request, "/v1/chat/completions", long) for _ in range(10)]
        until(lambda: workers.LARGE_WORKERS._unfinished == 10)
        assert live.chat(max_tokens=1).status == 200
        assert not any(attacker.done() for attacker in attackers)
        go_on.set()
        for attacker in attackers:
            found = attacker.result()
            assert found.status == 400
            assert "the prompt has at least" in found.error["message"]


def test_a_text_too_long_to_tokenize_is_refused(live: Live) -> None:
    found = live.request("/tokenize", {"prompt": "a" * (MIN_TEXT_LIMIT + 1)})
    assert found.status == 400
    assert found.error["message"] == "prompt must be a text of at most 1048576 characters, got 1048577"
    assert found.error["param"] == "prompt"
