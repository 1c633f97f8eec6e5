"""A client that disconnects during a long prefill, on the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferrule import AsyncLLM
from server.live import Live, serving, until

pytestmark = pytest.mark.native

LENGTH = 10_000
"""Tokens of a prompt that takes seconds."""


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_during_long_prefill_frees_slot_immediately(long_model: Path, stream: bool) -> None:
    with serving(llm=lambda: AsyncLLM(long_model, threads=2, max_num_seqs=1)) as live:
        expected = live.complete("The capital of France is", max_tokens=8, temperature=0).json["choices"]
        before = live.llm.metrics().computed_tokens
        body = {"prompt": [300 + i % 1000 for i in range(LENGTH)], "max_tokens": 4, "stream": stream}
        with live.connect() as client:
            client.sendall(_post("/v1/completions", json.dumps(body).encode()))
            until(lambda: live.llm.metrics().computed_tokens > before)
            assert live.llm.metrics().running == 1
        # There is one place, so this waits for what the client left behind.
        found = live.complete("The capital of France is", max_tokens=8, temperature=0)
        first = live.llm.metrics()
        assert found.json["choices"] == expected
        assert first.computed_tokens - before < LENGTH
        assert first.requests_finished["abort"] == 1
        until(lambda: _free(live))


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


def _free(live: Live) -> bool:
    metrics = live.llm.metrics()
    return not metrics.running and not metrics.waiting and not live.llm._registry.all()
