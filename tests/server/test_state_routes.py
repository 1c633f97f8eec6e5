"""GET /load and /tokenizer_info."""

from __future__ import annotations

import fakes
from ferrule.server import ServerSettings
from server.live import Live, serving, until


def test_load_is_the_number_of_running_requests(live: Live, engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.02
    assert live.request("/load").json == {"server_load": 0}
    with live.connect() as client:
        body = b'{"prompt": "Hi", "max_tokens": 500, "ignore_eos": true}'
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: live.request("/load").json == {"server_load": 1})
    until(lambda: live.request("/load").json == {"server_load": 0})


def test_tokenizer_info_is_served_where_it_is_enabled(live: Live, engine: type[fakes.Engine]) -> None:
    assert live.request("/tokenizer_info").status == 404
    with serving(ServerSettings(tokenizer_info=True)) as open_server:
        found = open_server.request("/tokenizer_info").json
        tokenizer = open_server.llm.get_tokenizer()
        assert (found["eos_token"], found["vocab_size"]) == (tokenizer.eos_token, tokenizer.vocab_size)
        assert found["chat_template"] == tokenizer.chat_template
        assert open_server.request("/tokenizer_info?model=none").status == 404
