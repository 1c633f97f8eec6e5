"""A server with a scripted engine, and the events of its streams."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fakes
from ferrule.server import ServerSettings
from server.live import Live, serving

THOUGHT, SAID, CITY = "Hm, é.", "I ask.", "Zürich"
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in (CITY, "Rome")
)
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{SAID} {CALLS}"
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass
class ScriptedServer:
    """A server with the embedded model's tokenizer and an engine whose output the test sets; by default `ANSWER`."""

    live: Live
    engine: type[fakes.Engine]
    prompts: list[str] = field(default_factory=list[str])
    """Rendered prompts, in the order of the requests."""

    def set_output(self, text: str) -> None:
        tokens = self.live.llm.tokenize(text, add_special_tokens=False)

        def script(prompt: list[int]) -> list[int]:
            self.prompts.append(self.live.llm.detokenize(prompt, skip_special_tokens=False))
            return tokens

        self.engine.script = staticmethod(script)  # type: ignore[assignment]


@contextmanager
def scripted_server(engine: type[fakes.Engine], **settings: Any) -> Generator[ScriptedServer]:
    given: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "ollama": True, **settings}
    with serving(ServerSettings(**given)) as live:
        found = ScriptedServer(live, engine)
        found.set_output(ANSWER)
        yield found


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream; each name must be the type in its body."""
    found: list[dict[str, Any]] = []
    for part in body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
