"""For everyone: by keyboard alone, read out, on a phone, in the dark; held to axe-core's rules."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import pytest
from playwright.sync_api import ViewportSize, expect

from server.page.chat_page import ChatPage, stream

AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
DESK: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
RICH = (
    "# Heading\n\n",
    "Some *words*, a [link](https://example.org) and `code`.\n\n",
    "> quoted\n\n",
    "1. one\n2. two\n\n",
    "```python\nx = 1\n```\n\n",
    "| a | b |\n|:--|--:|\n| 1 | 2 |\n\n",
    "- [x] done\n",
)
CAPITAL = "What is the capital of France?"


def assert_accessible(chat: ChatPage, state: str) -> None:
    """No fault of any rule of axe-core, whatever its weight."""
    chat.page.evaluate(AXE)
    violations = chat.page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    found = [(each["id"], each["impact"], [node["html"][:150] for node in each["nodes"]]) for each in violations]
    assert not found, state


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(open_chat: Callable[..., ChatPage], scheme: str, size: ViewportSize) -> None:
    chat = open_chat(color_scheme=scheme, viewport=size)
    name = f"{scheme}-{size['width']}"
    assert_accessible(chat, "empty")
    chat.shoot(f"{name}-empty")
    chat.fulfil(*RICH)
    chat.ask("Show me everything.")
    chat.act("regenerate")
    chat.wait()
    assert_accessible(chat, "an answer")
    chat.shoot(f"{name}-answer")
    chat.answer().locator(".token").nth(2).hover()
    expect(chat.at(".alternatives")).to_be_visible()
    assert_accessible(chat, "alternatives")
    chat.shoot(f"{name}-alternatives")
    chat.act("tokens")
    assert_accessible(chat, "tokens")
    chat.shoot(f"{name}-tokens")
    chat.page.keyboard.press("Escape")
    chat.at("#open-settings").click()
    chat.at("#temperature").fill("-1")
    assert_accessible(chat, "settings")
    chat.shoot(f"{name}-settings")
    chat.at("#close-settings").click()
    chat.page.unroute_all()
    chat.refuse(429, "too many")
    chat.send("Hello")
    expect(chat.at(".refusal")).to_be_visible()
    chat.act("edit", chat.at(".user").last)
    assert_accessible(chat, "a refusal and an editor")
    chat.shoot(f"{name}-refusal")
    chat.page.keyboard.press("Escape")
    chat.page.keyboard.press("Alt+k")
    assert_accessible(chat, "keys")
    chat.shoot(f"{name}-keys")
    chat.page.keyboard.press("Escape")
    if not chat.at("#sidebar").is_visible():
        chat.at("#open-sidebar").click()
        assert_accessible(chat, "conversations")
        chat.shoot(f"{name}-conversations")


def test_by_keyboard_alone(chat: ChatPage) -> None:
    """A conversation, its branches, its settings and another conversation, and no click."""
    keyboard = chat.page.keyboard
    expect(chat.at("#prompt")).to_be_focused()
    keyboard.press("Alt+s")
    expect(chat.at("#close-settings")).to_be_focused()
    while chat.page.evaluate("document.activeElement.id") != "temperature":
        keyboard.press("Tab")
    keyboard.type("0")
    keyboard.press("Alt+s")
    expect(chat.at("#open-settings")).to_be_focused()
    keyboard.press("Tab")
    while chat.page.evaluate("document.activeElement.id") != "prompt":
        keyboard.press("Tab")
    keyboard.type("What is the capital")
    keyboard.press("Shift+Enter")
    keyboard.type("of France?")
    keyboard.press("Enter")
    chat.wait()
    chat.expect_messages("What is the capital\nof France?")
    keyboard.press("Alt+e")
    expect(chat.at(".user textarea")).to_be_focused()
    keyboard.press("Control+a")
    keyboard.type(CAPITAL)
    keyboard.press("Enter")
    chat.wait()
    assert chat.answers() == ["The capital of France is Paris."]
    keyboard.press("Alt+r")
    chat.wait()
    assert chat.version() == "2/2"
    keyboard.press("Alt+Comma")
    assert chat.version() == "1/2"
    keyboard.press("Alt+Period")
    assert chat.version() == "2/2"
    keyboard.press("Alt+n")
    expect(chat.at("#prompt")).to_be_focused()
    chat.expect_messages()
    keyboard.press("Shift+Tab")
    assert chat.page.evaluate("document.activeElement !== document.body")


def test_the_focus_is_always_seen(chat: ChatPage) -> None:
    chat.ask(CAPITAL)
    chat.at("body").focus()
    seen: set[str] = set()
    for _ in range(40):
        chat.page.keyboard.press("Tab")
        label, visible = chat.page.evaluate(
            """() => {
                const element = document.activeElement;
                const holder = element.id === "prompt" ? element.form : element;
                const seen = element === document.body || getComputedStyle(holder).outlineStyle !== "none";
                return [element.id + element.className, seen];
            }"""
        )
        assert visible, label
        seen.add(label)
    assert len(seen) > 8


def test_what_happens_is_read_out(chat: ChatPage) -> None:
    said = chat.at("#announcements")
    expect(said).to_have_attribute("aria-live", "polite")
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    expect(said).to_have_text("Answer: The capital of France is Paris.")
    expect(chat.at(".assistant")).to_have_accessible_name("tiny")
    expect(chat.at(".user")).to_have_accessible_name("You")


def test_on_a_phone(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(viewport=PHONE, has_touch=True, is_mobile=True)
    chat.set(temperature="0")
    expect(chat.at("#sidebar")).to_be_hidden()
    # Enter is a new line on glass.
    chat.at("#prompt").tap()
    chat.page.keyboard.type("What is the capital of France?")
    chat.page.keyboard.press("Enter")
    expect(chat.at("#prompt")).to_have_value("What is the capital of France?\n")
    chat.at("#send").tap()
    chat.wait()
    for width in (320, PHONE["width"]):
        chat.page.set_viewport_size({"width": width, "height": 700})
        assert chat.page.evaluate("document.documentElement.scrollWidth") == width
        assert chat.page.evaluate("document.documentElement.scrollHeight") == 700, "only messages scroll"
    chat.at(".assistant .token").nth(1).tap()
    card = chat.at(".alternatives")
    expect(card).to_be_visible()
    box = card.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]
    chat.page.wait_for_timeout(500)
    expect(card).to_be_visible()
    chat.at(".who").first.tap()
    expect(card).to_be_hidden()
    # A side lies above the messages, and what is below cannot be reached.
    chat.at("#open-sidebar").tap()
    expect(chat.at("#sidebar")).to_be_visible()
    expect(chat.at("#main")).to_have_attribute("inert", "")
    chat.at("#new").tap()
    expect(chat.at("#sidebar")).to_be_hidden()
    chat.expect_messages()
    for button in chat.at("#main button:visible").all():
        size = button.bounding_box()
        assert size is not None
        assert min(size["width"], size["height"]) >= 36


def test_the_colours_follow_the_system_until_they_are_chosen(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(color_scheme="dark")

    def ground() -> dict[str, str]:
        return chat.page.evaluate(
            "(({ backgroundColor, scrollbarColor }) => ({ backgroundColor, scrollbarColor }))"
            "(getComputedStyle(document.body))"
        )

    dark = ground()
    chat.page.emulate_media(color_scheme="light")
    light = ground()
    assert all(dark[what] != light[what] for what in dark)
    chat.at("#theme").click()
    expect(chat.at("#theme")).to_have_accessible_name("Colours: light")
    chat.at("#theme").click()
    expect(chat.at("#theme")).to_have_accessible_name("Colours: dark")
    assert ground() == dark
    chat.open()
    assert ground() == dark
    chat.at("#theme").click()
    assert ground() == light


def test_code_is_copied(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(permissions=["clipboard-read", "clipboard-write"])
    chat.fulfil("Try:\n\n", "```python\nif x < 1:\n", "    y = '&amp;'\n```\n")
    chat.ask("Hello")
    chat.answer().get_by_role("button", name="Copy code").click()
    expect(chat.at("#announcements")).to_have_text("Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == "if x < 1:\n    y = '&amp;'"
    chat.act("copy")
    copied = chat.page.evaluate("navigator.clipboard.readText()")
    assert copied == "Try:\n\n```python\nif x < 1:\n    y = '&amp;'\n```\n"


def test_reasoning_is_folded(chat: ChatPage) -> None:
    thought = 'data: {"choices": [{"index": 0, "delta": {"reasoning_content": "Let me think."}}]}\n\n'
    body = thought + stream(["Paris", "."])
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    assert chat.ask(CAPITAL) == "Paris."
    expect(chat.at(".reasoning-text")).to_be_hidden()
    chat.at("summary").click()
    expect(chat.at(".reasoning-text")).to_have_text("Let me think.")
    assert chat.at(".assistant .token").all_inner_texts() == ["Paris", "."]


def test_a_reader_who_scrolled_away_stays_where_they_are(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(viewport={"width": 800, "height": 500})
    chat.fulfil(*(f"Line {number}.\n\n" for number in range(60)))
    chat.ask("Count.")
    scroller = chat.at("#thread")
    at_end = scroller.evaluate("(it) => it.scrollHeight - it.scrollTop - it.clientHeight")
    assert at_end < 2
    scroller.evaluate("(it) => (it.scrollTop = 0)")
    expect(chat.at("#latest")).to_be_visible()
    chat.page.keyboard.press("Alt+r")
    chat.wait()
    assert chat.version() == "2/2"
    assert scroller.evaluate("(it) => it.scrollTop") == 0
    chat.at("#latest").click()
    expect(chat.at("#latest")).to_be_hidden()
