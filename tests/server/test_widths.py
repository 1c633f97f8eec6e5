"""Wide bodies: other requests are answered meanwhile, and memory stays small."""

from __future__ import annotations

import gc
import resource
import threading
import time
from typing import Any

import pytest

from event_loop import SLACK
from ferrule.server.app import ROUTERS
from ferrule.server.batches import routes as batches
from ferrule.server.request_body import BodyRoute
from ferrule.server.responses import routes as responses
from ferrule.server.schema.limits import MAX_FIELDS, MAX_ITEMS, MAX_TOOLS
from server.live import Live

SIZE = 2_000_000
"""Approximate size of each body in bytes."""
MEMORY = 400 << 20
"""Memory limit for reading one body, in bytes; one error per member took gigabytes."""
DELAY = 0.3
"""CPU seconds of this process for which others may wait: a JSON parser in C keeps the interpreter's lock."""


def many(member: str) -> str:
    return f"[{','.join([member] * (SIZE // (len(member) + 1)))}]"


def fields(start: str) -> str:
    return start + ",".join(f'"{number:x}":0' for number in range(SIZE // 9))


SAID = '"messages":[{"role":"user","content":"a"}]'
WIDE: dict[str, tuple[str, str, str]] = {
    "objects": ("/v1/completions", f'{{"prompt":{many("{}")}}}', "prompt[0]"),
    "lists": ("/v1/completions", f'{{"prompt":{many("[]")}}}', "prompt"),
    "texts": ("/v1/completions", f'{{"prompt":{many(chr(34) * 2)}}}', "prompt"),
    "no ids": ("/detokenize", f'{{"tokens":{many(chr(34) * 2)}}}', "tokens[0]"),
    "fields": ("/v1/completions", f"{{{fields(chr(34) + 'prompt' + chr(34) + ':1,')}}}", ""),
    "biases": ("/v1/completions", f'{{"prompt":"a","logit_bias":{{{fields("")}}}}}', "logit_bias"),
    "stops": ("/v1/completions", f'{{"prompt":"a","stop":{many(chr(34) + "a" + chr(34))}}}', "stop"),
    "no messages": ("/v1/chat/completions", f'{{"messages":{many("1")}}}', "messages[0]"),
    "tools": ("/v1/chat/completions", f'{{{SAID},"tools":{many(chr(123) + chr(125))}}}', "tools"),
    "no texts": ("/v1/embeddings", f'{{"input":{many("{}")}}}', "input[0]"),
    "no items": ("/v1/responses", f'{{"input":{many("1")}}}', "input[0]"),
    "no parts": ("/v1/responses", f'{{"input":[{{"role":"user","content":{many("1")}}}]}}', "input[0].content[0]"),
    "no blocks": (
        "/v1/messages",
        f'{{"max_tokens":1,"messages":[{{"role":"user","content":{many("{}")}}}]}}',
        "messages[0].content[0]",
    ),
}


class Watch:
    """Repeats a small request, and measures the most CPU time that this process used during one.

    Wall-clock time would count the other processes of a busy machine.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.longest = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._ended.wait(0.005):
            begun = time.process_time()
            assert self._live.request("/version").status == 200
            self.longest = max(self.longest, time.process_time() - begun)


@pytest.mark.parametrize(("path", "body", "field"), WIDE.values(), ids=WIDE)
def test_wide_body_is_rejected_without_delaying_other_requests(live: Live, path: str, body: str, field: str) -> None:
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with Watch(live) as others:
        found = live.request(path, body.encode())
    assert found.status == 400
    assert len(found.body) < 1000
    assert field in found.error["message"]
    assert others.longest < DELAY * SLACK
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < MEMORY


def test_item_limits_are_named_in_error(live: Live) -> None:
    message, tool = {"role": "user", "content": "a"}, {"type": "function", "function": {"name": "f"}}
    for body, limit in (
        ({"messages": [message] * (MAX_ITEMS + 1)}, MAX_ITEMS),
        ({"messages": [message], "tools": [tool] * (MAX_TOOLS + 1)}, MAX_TOOLS),
        ({"messages": [message], **{f"x{number}": 1 for number in range(MAX_FIELDS)}}, MAX_FIELDS),
    ):
        found = live.request("/v1/chat/completions", body)
        assert found.status == 400
        assert str(limit) in found.error["message"]


def test_valid_wide_body_does_not_delay_other_requests(live: Live) -> None:
    text = "a b " * 200_000
    with Watch(live) as others:
        found = live.request("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert others.longest < DELAY * SLACK


def test_request_bodies_are_parsed_outside_event_loop(live: Live) -> None:
    app: Any = live.server.config.app
    described = app.openapi()["paths"]
    taking = {path for path, methods in described.items() if "requestBody" in methods.get("post", {})}
    taking.remove("/v1/files")  # goes to the disk while it arrives
    routers = [make(app.state.server) for make in ROUTERS]
    routers += [batches.router(None), responses.router(app.state.server, None)]
    routes = [route for router in routers for route in router.routes]
    assert taking
    assert taking <= {route.path for route in routes if isinstance(route, BodyRoute) and route.body_field}
