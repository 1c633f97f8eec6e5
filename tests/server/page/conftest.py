"""A server, a browser, and a page of it for each test; what the page complains of fails the test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from server.page.chat_page import ChatPage

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = Path(__file__).parents[3] / "target" / "screenshots"
START_SECONDS = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Chromium these tests are skipped, but where CI runs it must be there (`.ci/run` installs it)."""
    if CHROMIUM is not None or os.environ.get("CI"):
        return
    skip = pytest.mark.skip(reason="Chromium is not installed: apt-get install chromium")
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server of the embedded model answers, by two names."""
    with serving(tmp_path_factory.mktemp("server"), "--model", "tiny=tiny", "--model", "other=tiny") as url:
        yield url


@contextmanager
def serving(folder: Path, *arguments: str) -> Generator[str]:
    """A `ferrule serve` that is ready; its URL."""
    log = folder / "stderr"
    command = [sys.executable, "-m", "ferrule", "serve", "--port", "0", "--exit-with-parent", *arguments]
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"http://[\w.]+:\d+", log.read_text())
        if found is not None and _is_ready(found[0]):
            return found[0]
        time.sleep(0.05)
    pytest.fail(f"the server did not answer: {log.read_text()}")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. Not for the whole session: as long as Playwright runs there is an event loop in this thread."""
    with sync_playwright() as playwright:
        # A container's root has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_chat(browser: Browser, server_url: str) -> Iterator[Callable[..., ChatPage]]:
    """Opens the page in a browser profile of its own; keywords go to Playwright's `new_context`."""
    opened: list[ChatPage] = []

    def open_chat(base_url: str = server_url, **options: Any) -> ChatPage:
        chat = ChatPage(browser.new_context(base_url=base_url, **options).new_page(), SCREENSHOTS)
        chat.open()
        opened.append(chat)
        return chat

    yield open_chat
    for chat in opened:
        chat.page.context.close()
    assert not [complaint for chat in opened for complaint in chat.complaints]


@pytest.fixture
def chat(open_chat: Callable[..., ChatPage]) -> ChatPage:
    """The page on a desk."""
    return open_chat(viewport={"width": 1280, "height": 800}, color_scheme="light")
