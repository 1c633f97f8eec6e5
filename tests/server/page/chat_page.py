"""The chat page as its users see it: what they do and what they find, in a word each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Locator, Page, Request, Route, expect

TIMEOUT = 30_000
"""Milliseconds until something is held not to happen."""
STREAM = "text/event-stream"


@dataclass
class ChatPage:
    """A page; `complaints` are errors of its scripts and whatever its policy kept from happening."""

    page: Page
    screenshots: Path
    complaints: list[str] = field(default_factory=list[str])
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Bodies of what it asked of the model."""

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", self._on_request)
        self.page.set_default_timeout(TIMEOUT)
        expect.set_options(timeout=TIMEOUT)

    def _on_console(self, message: ConsoleMessage) -> None:
        # Chromium reports each refused request; what the page makes of it is what tests look at.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.requests.append(json.loads(request.post_data or "{}"))

    def open(self) -> None:
        """Opens or reloads the page."""
        self.page.goto("/")
        expect(self.page.locator("#model option")).not_to_have_count(0)

    def at(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def send(self, text: str) -> None:
        """Sends a message and does not wait."""
        self.at("#prompt").fill(text)
        self.at("#send").click()

    def ask(self, text: str) -> str:
        """Sends a message; the answer, once it is whole."""
        self.send(text)
        self.wait()
        return self.answers()[-1]

    def wait(self) -> None:
        """Waits until no answer is being generated."""
        expect(self.at("#send")).to_have_accessible_name("Send")
        expect(self.at(".running")).to_have_count(0)

    def answers(self) -> list[str]:
        return self.at(".assistant .body").all_inner_texts()

    def expect_messages(self, *texts: str) -> None:
        """Returns the visible messages of the user."""
        expect(self.at(".user .body")).to_have_text(texts)

    def answer(self) -> Locator:
        """The last answer."""
        return self.at(".assistant").last

    def act(self, action: str, at: Locator | None = None) -> None:
        """Presses a button below the last answer, or of another message."""
        (at or self.answer()).locator(f"[data-act={action}]").click()

    def version(self, at: Locator | None = None) -> str:
        """Returns the visible version of the last answer or another message: `2/3`."""
        return (at or self.answer()).locator(".branch").inner_text()

    def set(self, **values: str) -> None:
        """Writes into fields of the settings."""
        self.at("#open-settings").click()
        for name, value in values.items():
            self.at(f"#{name}").fill(value)
        self.at("#close-settings").click()

    def expect_titles(self, *titles: str) -> None:
        """Conversations are listed a moment after they have changed."""
        expect(self.at(".opener")).to_have_text(titles)

    def fulfil(self, *pieces: str, error: dict[str, Any] | None = None) -> None:
        """From now on the model says these pieces, a token each, whatever it is asked."""
        body = stream(pieces, error)
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type=STREAM))

    def refuse(self, status: int, message: str, path: str = "**/v1/chat/completions") -> None:
        """Makes the server refuse further requests."""

        def refuse(route: Route) -> None:
            route.fulfill(status=status, json={"error": {"message": message, "type": "x", "param": None, "code": None}})

        self.page.route(path, refuse)

    def shoot(self, name: str) -> None:
        """Keeps a picture for people to look at."""
        self.screenshots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.screenshots / f"{name}.png")


def stream(pieces: Sequence[str], error: dict[str, Any] | None = None) -> str:
    """An answer as the server streams it, each piece a token with two alternatives."""
    events: list[dict[str, Any]] = []
    for piece in pieces:
        top = [{"token": piece, "logprob": -0.1}, {"token": " else", "logprob": -3.0}, {"token": "\n", "logprob": -4.0}]
        token = {"token": piece, "logprob": -0.1, "bytes": list(piece.encode()), "top_logprobs": top}
        events.append({"choices": [{"index": 0, "delta": {"content": piece}, "logprobs": {"content": [token]}}]})
    if error is not None:
        events.append({"error": error})
    else:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(pieces)}})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
