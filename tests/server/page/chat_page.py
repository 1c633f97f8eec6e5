"""Page object of the chat page: actions of users, and the visible messages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Locator, Page, Request, Route, expect

TIMEOUT = 60_000
"""Milliseconds after which an expectation fails; a busy machine needs some seconds for an answer."""
STREAM = "text/event-stream"
AFTER_TRANSACTIONS = """() => new Promise((resolve, reject) => {
    const opened = indexedDB.open("ferrule");
    opened.onsuccess = () => {
        const transaction = opened.result.transaction(opened.result.objectStoreNames, "readwrite");
        transaction.oncomplete = () => { opened.result.close(); resolve(); };
        transaction.onabort = reject;
    };
    opened.onerror = reject;
})"""

IS_AT_END = """() => {
    const { scrollHeight, scrollTop, clientHeight } = document.getElementById("thread");
    return scrollHeight - scrollTop - clientHeight < 2;
}"""


@dataclass
class ChatPage:
    """The chat page in a browser tab."""

    page: Page
    screenshots: Path
    errors: list[str] = field(default_factory=list[str])
    """Errors of scripts, and violations of the content security policy."""
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Bodies of the completion requests."""

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", self._on_request)
        self.page.set_default_timeout(TIMEOUT)
        expect.set_options(timeout=TIMEOUT)

    def _on_console(self, message: ConsoleMessage) -> None:
        # Chromium logs every error response; the tests check the page's reaction instead.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def _on_request(self, request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.requests.append(json.loads(request.post_data or "{}"))

    def open(self) -> None:
        """Opens or reloads the page."""
        self.page.goto("/")
        expect(self.page.locator("#model option")).not_to_have_count(0)

    def reload(self) -> None:
        """Reloads the page once its changes are saved: a transaction waits for those that began before it."""
        self.page.evaluate(AFTER_TRANSACTIONS)
        self.open()

    def find(self, selector: str) -> Locator:
        """Returns the elements of a CSS selector."""
        return self.page.locator(selector)

    def send(self, text: str) -> None:
        """Sends a message without waiting for the answer."""
        self.find("#prompt").fill(text)
        self.find("#send").click()

    def ask(self, text: str) -> str:
        """Sends a message, and returns the complete answer."""
        self.send(text)
        self.wait()
        return self.answers()[-1]

    def wait(self) -> None:
        """Waits until no answer is being generated."""
        expect(self.find("#send")).to_have_accessible_name("Send")
        expect(self.find(".running")).to_have_count(0)

    def wait_for(self, condition: Callable[[], object], description: str) -> None:
        """Waits until a condition of the test is true, and receives the events of the browser meanwhile."""
        deadline = time.monotonic() + TIMEOUT / 1000
        while not condition():
            assert time.monotonic() < deadline, description
            self.page.wait_for_timeout(50)

    def wait_until(self, function: str, argument: Any = None) -> None:
        """Waits until a function of the page returns true.

        Playwright's `wait_for_function` evaluates an expression again and again, which the page's security policy
        allows the first time only.
        """
        self.wait_for(lambda: self.page.evaluate(function, argument), function)

    def answers(self) -> list[str]:
        """Returns the texts of the visible answers."""
        return self.find(".assistant .body").all_inner_texts()

    def expect_messages(self, *texts: str) -> None:
        """Expects these visible messages of the user."""
        expect(self.find(".user .body")).to_have_text(texts)

    def answer(self) -> Locator:
        """Returns the last answer."""
        return self.find(".assistant").last

    def press(self, action: str, message: Locator | None = None) -> None:
        """Presses a button of the last answer or of another message."""
        (message or self.answer()).locator(f"[data-action={action}]").click()

    def expect_answers(self, *texts: str) -> None:
        """Expects these visible answers."""
        expect(self.find(".assistant .body")).to_have_text(texts, use_inner_text=True)

    def expect_version(self, version: str, message: Locator | None = None) -> None:
        """Expects the last answer or another message to be this version, such as `2/3`."""
        expect((message or self.answer()).locator(".version")).to_have_text(version)

    def expect_width(self, width: int) -> None:
        """Expects the page to have this width in pixels without scrolling; the browser changes sizes asynchronously."""
        self.wait_until("width => innerWidth === width && document.documentElement.scrollWidth === width", width)

    def expect_end(self) -> None:
        """Expects the end of the messages to be visible."""
        self.wait_until(IS_AT_END)

    def set(self, **values: str) -> None:
        """Changes fields of the settings."""
        self.find("#open-settings").click()
        for name, value in values.items():
            self.find(f"#{name}").fill(value)
        self.find("#close-settings").click()

    def expect_titles(self, *titles: str) -> None:
        """Expects these titles in the list, which is updated asynchronously."""
        expect(self.find(".open-conversation")).to_have_text(titles)

    def respond(self, *pieces: str, error: dict[str, Any] | None = None, logprobs: Sequence[float] = ()) -> None:
        """Makes the server answer all later requests with these tokens; without `logprobs`, all have the same."""
        body = stream_body(pieces, error, logprobs)
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type=STREAM))

    def respond_with_error(self, status: int, message: str, path: str = "**/v1/chat/completions") -> None:
        """Makes the server answer all later requests with an error."""

        def fulfill(route: Route) -> None:
            route.fulfill(status=status, json={"error": {"message": message, "type": "x", "param": None, "code": None}})

        self.page.route(path, fulfill)

    def screenshot(self, name: str) -> None:
        """Saves a screenshot for people to look at."""
        self.screenshots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.screenshots / f"{name}.png")


def stream_body(pieces: Sequence[str], error: dict[str, Any] | None = None, logprobs: Sequence[float] = ()) -> str:
    """Returns the body of a streamed answer; each piece is a token with two alternatives."""
    events: list[dict[str, Any]] = []
    for piece, logprob in zip(pieces, logprobs or [-0.1] * len(pieces), strict=True):
        others = [{"token": " else", "logprob": -3.0}, {"token": "\n", "logprob": -4.0}]
        top = [{"token": piece, "logprob": logprob}, *others]
        token = {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": top}
        events.append({"choices": [{"index": 0, "delta": {"content": piece}, "logprobs": {"content": [token]}}]})
    if error is not None:
        events.append({"error": error})
    else:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(pieces)}})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
