"""Accessibility: axe-core's rules, keyboard, screen readers, phones and the dark theme."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import pytest
from playwright.sync_api import ViewportSize, expect

from server.page.chat_page import ChatPage, stream_body

AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
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
    """Asserts that axe-core finds no violation of any impact level."""
    chat.page.evaluate(AXE)
    violations = chat.page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    found = [(each["id"], each["impact"], [node["html"][:150] for node in each["nodes"]]) for each in violations]
    assert not found, state


@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)], ids=["light", "dark"])
def test_axe_finds_no_violation(open_chat: Callable[..., ChatPage], scheme: str, size: ViewportSize) -> None:
    chat = open_chat(color_scheme=scheme, viewport=size)
    name = f"{scheme}-{size['width']}"
    assert_accessible(chat, "empty")
    chat.screenshot(f"{name}-empty")
    chat.respond(*RICH)
    chat.ask("Show me everything.")
    chat.press("regenerate")
    chat.wait()
    assert_accessible(chat, "an answer")
    chat.screenshot(f"{name}-answer")
    chat.answer().locator(".token").nth(2).hover()
    expect(chat.find(".alternatives")).to_be_visible()
    assert_accessible(chat, "alternatives")
    chat.screenshot(f"{name}-alternatives")
    chat.press("tokens")
    assert_accessible(chat, "tokens")
    chat.screenshot(f"{name}-tokens")
    chat.page.keyboard.press("Escape")
    chat.find("#open-settings").click()
    chat.find("#temperature").fill("-1")
    assert_accessible(chat, "settings")
    chat.screenshot(f"{name}-settings")
    chat.find("#close-settings").click()
    chat.page.unroute_all()
    chat.respond_with_error(429, "too many")
    chat.send("Hello")
    expect(chat.find(".error")).to_be_visible()
    chat.press("edit", chat.find(".user").last)
    assert_accessible(chat, "an error and an editor")
    chat.screenshot(f"{name}-error")
    chat.page.keyboard.press("Escape")
    chat.page.keyboard.press("Alt+k")
    assert_accessible(chat, "shortcuts")
    chat.screenshot(f"{name}-shortcuts")
    chat.page.keyboard.press("Escape")
    if not chat.find("#sidebar").is_visible():
        chat.find("#open-sidebar").click()
        assert_accessible(chat, "conversations")
        chat.screenshot(f"{name}-conversations")


def test_keyboard_without_mouse(chat: ChatPage) -> None:
    """Uses a conversation, its versions, its settings and another conversation without a click."""
    keyboard = chat.page.keyboard
    expect(chat.find("#prompt")).to_be_focused()
    keyboard.press("Alt+s")
    expect(chat.find("#close-settings")).to_be_focused()
    while chat.page.evaluate("document.activeElement.id") != "temperature":
        keyboard.press("Tab")
    keyboard.type("0")
    keyboard.press("Alt+s")
    expect(chat.find("#open-settings")).to_be_focused()
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
    expect(chat.find(".user textarea")).to_be_focused()
    keyboard.press("Control+a")
    keyboard.type(CAPITAL)
    keyboard.press("Enter")
    chat.wait()
    chat.expect_answers("The capital of France is Paris.")
    keyboard.press("Alt+r")
    chat.wait()
    chat.expect_version("2/2")
    keyboard.press("Alt+Comma")
    chat.expect_version("1/2")
    keyboard.press("Alt+Period")
    chat.expect_version("2/2")
    keyboard.press("Alt+n")
    expect(chat.find("#prompt")).to_be_focused()
    chat.expect_messages()
    keyboard.press("Shift+Tab")
    assert chat.page.evaluate("document.activeElement !== document.body")


def test_the_focus_is_always_visible(chat: ChatPage) -> None:
    chat.ask(CAPITAL)
    chat.find("body").focus()
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


def test_answers_are_announced(chat: ChatPage) -> None:
    announcements = chat.find("#announcements")
    expect(announcements).to_have_attribute("aria-live", "polite")
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    expect(announcements).to_have_text("Answer: The capital of France is Paris.")
    expect(chat.find(".assistant")).to_have_accessible_name("tiny")
    expect(chat.find(".user")).to_have_accessible_name("You")


def test_phone(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(viewport=PHONE, has_touch=True, is_mobile=True)
    chat.set(temperature="0")
    expect(chat.find("#sidebar")).to_be_hidden()
    # Enter starts a new line on touch screens.
    chat.find("#prompt").tap()
    chat.page.keyboard.type("What is the capital of France?")
    chat.page.keyboard.press("Enter")
    expect(chat.find("#prompt")).to_have_value("What is the capital of France?\n")
    chat.find("#send").tap()
    chat.wait()
    for width in (320, PHONE["width"]):
        chat.page.set_viewport_size({"width": width, "height": 700})
        chat.expect_width(width)
        # Only messages scroll.
        chat.wait_until("document.documentElement.scrollHeight === 700")
    chat.find(".assistant .token").nth(1).tap()
    card = chat.find(".alternatives")
    expect(card).to_be_visible()
    box = card.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]
    chat.page.wait_for_timeout(500)
    expect(card).to_be_visible()
    chat.find(".author").first.tap()
    expect(card).to_be_hidden()
    # An open sidebar covers the messages, which are inert.
    chat.find("#open-sidebar").tap()
    expect(chat.find("#sidebar")).to_be_visible()
    expect(chat.find("#main")).to_have_attribute("inert", "")
    chat.find("#new").tap()
    expect(chat.find("#sidebar")).to_be_hidden()
    chat.expect_messages()
    for button in chat.find("#main button:visible").all():
        size = button.bounding_box()
        assert size is not None
        assert min(size["width"], size["height"]) >= 36


def test_the_theme_follows_the_system_until_one_is_selected(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(color_scheme="dark")

    def colors() -> dict[str, str]:
        return chat.page.evaluate(
            "(({ backgroundColor, scrollbarColor }) => ({ backgroundColor, scrollbarColor }))"
            "(getComputedStyle(document.body))"
        )

    dark = colors()
    chat.page.emulate_media(color_scheme="light")
    expect(chat.find("body")).not_to_have_css("background-color", dark["backgroundColor"])
    light = colors()
    assert dark["scrollbarColor"] != light["scrollbarColor"]
    chat.find("#theme").click()
    expect(chat.find("#theme")).to_have_accessible_name("Theme: light")
    chat.find("#theme").click()
    expect(chat.find("#theme")).to_have_accessible_name("Theme: dark")
    assert colors() == dark
    chat.open()
    assert colors() == dark
    chat.find("#theme").click()
    assert colors() == light


def test_code_is_copied(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(permissions=["clipboard-read", "clipboard-write"])
    chat.respond("Try:\n\n", "```python\nif x < 1:\n", "    y = '&amp;'\n```\n")
    chat.ask("Hello")
    chat.answer().get_by_role("button", name="Copy code").click()
    expect(chat.find("#announcements")).to_have_text("Copied")
    copied = "async (text) => (await navigator.clipboard.readText()) === text"
    chat.wait_until(copied, "if x < 1:\n    y = '&amp;'")
    chat.press("copy")
    chat.wait_until(copied, "Try:\n\n```python\nif x < 1:\n    y = '&amp;'\n```\n")


def test_reasoning_is_collapsed(chat: ChatPage) -> None:
    thought = 'data: {"choices": [{"index": 0, "delta": {"reasoning_content": "Let me think."}}]}\n\n'
    body = thought + stream_body(["Paris", "."])
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    assert chat.ask(CAPITAL) == "Paris."
    expect(chat.find(".reasoning-text")).to_be_hidden()
    chat.find(".message summary").click()
    expect(chat.find(".reasoning-text")).to_have_text("Let me think.")
    assert chat.find(".assistant .token").all_inner_texts() == ["Paris", "."]


def test_the_composer_of_an_empty_conversation_is_in_the_middle(chat: ChatPage) -> None:
    def middle() -> tuple[float, float]:
        box = chat.find("#composer").bounding_box()
        assert box is not None
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    main = chat.find("#main").bounding_box()
    assert main is not None
    x, y = middle()
    assert abs(x - (main["x"] + main["width"] / 2)) < 2
    assert 300 < y < 600, "of 800 pixels"
    chat.ask("Hello")
    assert middle()[1] > 700


def test_a_long_conversation_follows_the_stream_and_keeps_its_end(chat: ChatPage) -> None:
    """Messages far from the visible part are not laid out."""
    chat.respond(*(f"Line {number}.\n\n" for number in range(30)))
    for number in range(10):
        chat.ask(f"Question {number}")
    chat.expect_end()
    hidden = chat.find(".message").first.evaluate("(it) => getComputedStyle(it).contentVisibility")
    assert hidden == "auto"
    chat.open()
    chat.expect_messages(*(f"Question {number}" for number in range(10)))
    chat.expect_end()
    chat.find(".message").first.scroll_into_view_if_needed()
    expect(chat.find(".user .body").first).to_be_in_viewport()


def test_scrolling_away_stops_following_the_stream(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat(viewport={"width": 800, "height": 500})
    chat.respond(*(f"Line {number}.\n\n" for number in range(60)))
    chat.ask("Count.")
    scroller = chat.find("#thread")
    chat.expect_end()
    scroller.evaluate("(it) => (it.scrollTop = 0)")
    expect(chat.find("#scroll-to-end")).to_be_visible()
    chat.page.keyboard.press("Alt+r")
    chat.wait()
    chat.expect_version("2/2")
    assert scroller.evaluate("(it) => it.scrollTop") == 0
    chat.find("#scroll-to-end").click()
    expect(chat.find("#scroll-to-end")).to_be_hidden()
