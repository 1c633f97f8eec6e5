"""Prompts that are longer than the context, in every API's form of errors."""

from __future__ import annotations

from typing import Any

import pytest

from server.live import Live

CONTEXT = 2048
TEXT = "word " * (2 * CONTEXT)
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/responses", {"input": TEXT}),
        ("/completion", {"prompt": TEXT}),
    ],
)
def test_error_states_the_tokens_and_the_context(live: Live, path: str, body: dict[str, Any]) -> None:
    answer = live.request(path, body)
    assert answer.status == 400
    assert answer.error["code"] == (400 if path == "/completion" else "context_length_exceeded")
    assert answer.error["type"] == "exceed_context_size_error"
    assert answer.error["n_prompt_tokens"] >= 2 * CONTEXT
    assert answer.error["n_ctx"] == CONTEXT


def test_anthropic_has_its_own_type(live: Live) -> None:
    answer = live.request("/v1/messages", {"messages": MESSAGES, "max_tokens": 5})
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
