#!/usr/bin/env python
"""Measure the chat page with a long conversation in headless Chromium.

Imports a conversation whose answers have the alternatives of each token, opens it, and sends messages. Several versions
of the page are measured in turns, each in a new browser profile per round. Their files come from the directories and
the answers from this script, so that the figures do not depend on a server or a model. Prints medians in milliseconds:

- `appears`: time from pressing Enter to the end of the frame that shows the message;
- `appears_cpu`: CPU time of the page's main thread until then, which depends less on other load;
- `saved_cpu`: CPU time of the main thread until the message is saved;
- `answer_cpu`: CPU time of the main thread for an answer of 150 tokens, from its first token until it is saved;
- `open_cpu`: CPU time of the main thread until a new tab shows the conversation.

    python benches/chat_page.py
    python benches/chat_page.py --rounds 3 python/ferrule/server/page OTHER_CHECKOUT/python/ferrule/server/page
"""

from __future__ import annotations

import argparse
import json
import mimetypes
import shutil
import statistics
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, FilePayload, Page, Route, expect, sync_playwright

import ferrule
from ferrule.server.page_files import HEADERS

PAGE = Path(ferrule.__file__).parent / "server" / "page"
URL = "http://localhost:8000/"
TIMEOUT = 120_000
"""Milliseconds until the page must show something."""
ANSWER_TOKENS = 150
MODEL = {"id": "model", "max_model_len": 1 << 24, "answer_defaults": {"max_tokens": 2048}}
STARTED = """() => {
    addEventListener("keydown", () => {
        performance.mark("begin");
        // The task after a frame begins when the frame is laid out and painted.
        requestAnimationFrame(() => {
            const { port1, port2 } = new MessageChannel();
            port1.onmessage = () => performance.mark("painted");
            port2.postMessage(null);
        });
    }, { once: true, capture: true });
}"""
APPEARED = """() => {
    const [{ startTime: begin }] = performance.getEntriesByName("begin");
    const painted = performance.getEntriesByName("painted")[0]?.startTime;
    if (painted !== undefined) performance.clearMarks();
    return painted === undefined ? null : painted - begin;
}"""
SAVED = """() => new Promise((resolve, reject) => {
    const opened = indexedDB.open("ferrule");
    opened.onsuccess = () => {
        // A transaction waits for those that began before it.
        const transaction = opened.result.transaction(opened.result.objectStoreNames, "readwrite");
        transaction.oncomplete = () => { opened.result.close(); resolve(); };
        transaction.onabort = reject;
    };
    opened.onerror = reject;
})"""


def library(messages: int, tokens: int) -> FilePayload:
    """Returns an exported file with one conversation, whose messages have this number of tokens."""
    nodes: dict[str, dict[str, Any]] = {}
    parent = None
    words = [word_token(number) for number in range(tokens)]
    text = "".join(word["text"] for word in words)
    ended: dict[str, Any] = {"model": "model", "reasoning": "", "statistics": {}, "finishReason": "stop", "error": None}
    for number in range(messages):
        identifier = f"{number:032x}"
        role = "assistant" if number % 2 else "user"
        node = {"id": identifier, "parent": parent, "role": role, "content": text, "created": number}
        nodes[identifier] = {**node, **ended, "tokens": words} if role == "assistant" else node
        parent = identifier
    common: dict[str, Any] = {
        "title": "Long",
        "created": 0,
        "updated": 0,
        "model": None,
        "system": "",
        "parameters": {},
    }
    file = {
        "kind": "ferrule conversations",
        "format": 1,
        "conversations": [{**common, "nodes": nodes, "selected": {}}],
    }
    return {"name": "long.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}


def word_token(number: int) -> dict[str, Any]:
    """Returns a token with five alternatives; every twentieth ends a paragraph."""
    text = f" word{number % 97}" if number % 20 else "\n\nword"
    return {"text": text, "logprob": -0.25, "top": [[f" other{other}", -0.25 - other] for other in range(5)]}


def answer_body() -> str:
    """Returns a streamed answer."""
    events: list[dict[str, Any]] = []
    for number in range(ANSWER_TOKENS):
        word = word_token(number)
        top = [{"token": text, "logprob": logprob} for text, logprob in word["top"]]
        entry = {"token": word["text"], "logprob": -0.25, "bytes": list(word["text"].encode()), "top_logprobs": top}
        delta = {"content": word["text"]}
        events.append({"choices": [{"index": 0, "delta": delta, "logprobs": {"content": [entry]}}]})
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


class Measurement:
    """A tab with one version of the page."""

    def __init__(self, context: BrowserContext, directory: Path) -> None:
        self.directory = directory
        self.page: Page = context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        # Playwright does not say what the replies contain.
        self.client: Any = self.page.context.new_cdp_session(self.page)
        self.client.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.waiting: list[Route] = []
        self.page.route("**/*", self.serve)

    def serve(self, route: Route) -> None:
        """Answers a request of the page; a completion waits in `waiting`."""
        path = urlsplit(route.request.url).path.strip("/")
        if path == "v1/models":
            route.fulfill(json={"data": [MODEL]})
        elif path == "v1/chat/completions":
            self.waiting.append(route)
        else:
            file = self.directory / (path or "index.html")
            kind = mimetypes.guess_type(file)[0]
            route.fulfill(path=file, content_type=kind, headers=HEADERS | {"Content-Type": kind or "text/plain"})

    def cpu(self) -> float:
        """Returns the CPU time of the tasks of the main thread, in milliseconds."""
        metrics = self.client.send("Performance.getMetrics")["metrics"]
        return 1000 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def import_conversation(self, file: FilePayload, messages: int) -> None:
        """Imports a conversation, and waits until it is saved."""
        self.page.goto(URL)
        expect(self.page.locator("#model option")).not_to_have_count(0)
        self.page.locator("#import-file").set_input_files(file)
        expect(self.page.locator(".message")).to_have_count(messages, timeout=TIMEOUT)
        self.page.evaluate(SAVED)

    def open(self, messages: int) -> float:
        """Opens the page with the conversation; returns the CPU time until it shows it."""
        self.page.goto(URL)
        expect(self.page.locator(".message")).to_have_count(messages, timeout=TIMEOUT)
        expect(self.page.locator("#model option")).not_to_have_count(0)
        return self.cpu()

    def send(self) -> dict[str, float]:
        """Sends a message and gives it an answer."""
        self.page.locator("#prompt").fill("A new message")
        self.page.evaluate(STARTED)
        begin = self.cpu()
        self.page.keyboard.press("Enter")
        while (appears := self.page.evaluate(APPEARED)) is None:
            self.page.wait_for_timeout(10)
        painted = self.cpu()
        while not self.waiting:
            self.page.wait_for_timeout(10)
        self.page.evaluate(SAVED)
        saved = self.cpu()
        self.waiting.pop().fulfill(body=answer_body(), content_type="text/event-stream")
        expect(self.page.locator(".running")).to_have_count(0, timeout=TIMEOUT)
        self.page.evaluate(SAVED)
        return {
            "appears": appears,
            "appears_cpu": painted - begin,
            "saved_cpu": saved - begin,
            "answer_cpu": self.cpu() - saved,
        }


def measure(browser: Browser, directory: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Measures one version of the page once."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    first = Measurement(context, directory)
    first.import_conversation(library(options.messages, options.tokens), options.messages)
    first.page.close()
    measurement = Measurement(context, directory)
    opened = measurement.open(options.messages)
    sent = [measurement.send() for _ in range(options.sends)]
    context.close()
    # The first message of a page compiles its scripts.
    return [{"open_cpu": opened, **each} for each in sent[1:]]


def main() -> None:
    """Measure and print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="*", default=[PAGE], help="versions of the page")
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=150, help="tokens of each message")
    parser.add_argument("--sends", type=int, default=6, help="messages sent in each round, the first one not counted")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {str(directory): [] for directory in options.directories}
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root in a container.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(options.rounds):
            for directory in options.directories:
                found[str(directory)] += measure(browser, directory, options)
        browser.close()
    medians = {
        name: {figure: round(statistics.median(each[figure] for each in sent), 1) for figure in sent[0]}
        for name, sent in found.items()
    }
    record = {"messages": options.messages, "tokens": options.tokens, "rounds": options.rounds, "medians": medians}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
