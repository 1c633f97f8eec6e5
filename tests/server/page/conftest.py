"""Fixtures: a server, a browser, and a page for each test; errors of the page fail the test."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from serve_process import served
from server.page.chat_page import ChatPage

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
SCREENSHOTS = Path(__file__).parents[3] / "target" / "screenshots"
SERVE = ("-m", "ferrule", "serve", "--port", "0", "--exit-with-parent")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests without Chromium, except in CI, where `.ci/run` installs it."""
    if CHROMIUM is not None or os.environ.get("CI"):
        return
    skip = pytest.mark.skip(reason="Chromium is not installed: apt-get install chromium-headless-shell")
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def server_url(long_model: Path) -> Iterator[str]:
    """URL of a server with the embedded model under two names, and a context that no answer fills during a test."""
    with served(*SERVE, "--model", f"tiny={long_model}", "--model", f"other={long_model}") as url:
        for model in ("tiny", "other"):
            load(url, model)
        yield url


def load(url: str, model: str) -> None:
    """Makes the server load a model, which it otherwise does for the first request."""
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
        answer.read()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; per module, because an event loop occupies this thread while Playwright runs."""
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root in a container.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_chat(browser: Browser, server_url: str) -> Iterator[Callable[..., ChatPage]]:
    """Opens the page in a new browser profile; keyword arguments are those of Playwright's `new_context`."""
    opened: list[ChatPage] = []

    def open_chat(base_url: str = server_url, **options: Any) -> ChatPage:
        options.setdefault("permissions", ["clipboard-write"])  # which the whole browser has by default
        chat = ChatPage(browser.new_context(base_url=base_url, **options).new_page(), SCREENSHOTS)
        chat.open()
        opened.append(chat)
        return chat

    yield open_chat
    for chat in opened:
        chat.page.context.close()
    assert [error for chat in opened for error in chat.errors] == []


@pytest.fixture
def chat(open_chat: Callable[..., ChatPage]) -> ChatPage:
    """The page in a desktop window with the light theme."""
    return open_chat(viewport={"width": 1280, "height": 800}, color_scheme="light")
