"""A server whose model says what a test wants to hear, and streams as they are on the wire."""

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
class Talking:
    """The embedded model's tokenizer, and an engine that says `ANSWER`."""

    live: Live
    engine: type[fakes.Engine]
    prompts: list[str] = field(default_factory=list[str])
    """Prompt of the request, as rendered by the template."""

    def says(self, text: str) -> None:
        tokens = self.live.llm.tokenize(text, add_special_tokens=False)

        def script(prompt: list[int]) -> list[int]:
            self.prompts.append(self.live.llm.detokenize(prompt, skip_special_tokens=False))
            return tokens

        self.engine.script = staticmethod(script)  # type: ignore[assignment]


@contextmanager
def talking(engine: type[fakes.Engine], **settings: Any) -> Generator[Talking]:
    given: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "ollama": True, **settings}
    with serving(ServerSettings(**given)) as live:
        found = Talking(live, engine)
        found.says(ANSWER)
        yield found


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream; each name must be the type in its body."""
    found: list[dict[str, Any]] = []
    for part in body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert name == f"event: {said['type']}"
        found.append(said)
    return found
