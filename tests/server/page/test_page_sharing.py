"""Answers colored by certainty, two versions side by side, and a conversation as one HTML file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from server.page.chat_page import ChatPage
from server.page.test_page_access import assert_accessible

PIECES = ("Sure", " likely", " maybe", " hardly", " never", ".\n\n", "```python\n", "x = 'y'", "\n```\n\n", "$a", "^2$")
LOGPROBS = (-0.01, -0.2, -0.6, -1.6, -5.0, -0.01, -0.01, -0.01, -0.01, -0.01, -3.0)
LEVELS = ["0", "1", "2", "3", "4"]


@pytest.fixture
def answered(chat: ChatPage) -> ChatPage:
    show(chat)
    return chat


def show(chat: ChatPage) -> None:
    chat.respond(*PIECES, logprobs=LOGPROBS)
    chat.ask('How <sure> & "certain"?')
    expect(chat.answer().locator("math")).to_have_count(1)


def backgrounds(tokens: Locator) -> list[str]:
    """Returns the background colors of tokens."""
    return tokens.evaluate_all("(tokens) => tokens.map((token) => getComputedStyle(token).backgroundColor)")


def test_an_answer_is_colored_by_certainty_on_demand(answered: ChatPage) -> None:
    tokens = answered.answer().locator("p").first.locator(".token")
    assert tokens.evaluate_all("(all) => all.map((token) => token.dataset.certainty)")[:5] == LEVELS
    transparent = backgrounds(tokens)[0]
    assert set(backgrounds(tokens)) == {transparent}
    legend = answered.answer().locator(".certainty-legend")
    expect(legend).to_be_hidden()
    answered.press("certainty")
    expect(answered.answer().locator("[data-action=certainty]")).to_have_attribute("aria-pressed", "true")
    colors = backgrounds(tokens)[:5]
    assert colors[0] == transparent
    assert len(set(colors)) == 5
    assert backgrounds(legend.locator("span")) == colors
    expect(legend).to_contain_text("≥ 90 %70 to 90 %40 to 70 %10 to 40 %< 10 %")
    # A formula has the color of its least certain token.
    assert backgrounds(answered.answer().locator(".math")) == [colors[4]]
    answered.press("certainty")
    assert set(backgrounds(tokens)) == {transparent}


def test_a_fork_is_shown_beside_the_original(answered: ChatPage) -> None:
    original = answered.answers()[-1]
    answered.page.unroute_all()
    answered.respond(" this", " time")
    answered.answer().locator(".token").nth(1).hover()
    answered.find(".alternatives button").first.click()
    answered.wait()
    answered.expect_answers("Sure else this time")
    other = answered.answer().locator(".other-version")
    expect(other).to_have_accessible_name("Version 1 of 2")
    assert other.locator(".prose").inner_text() == original
    expect(answered.answer().locator(".side-label")).to_have_text(["Version 1 of 2", "Version 2 of 2"])
    left, right = other.bounding_box(), answered.answer().locator(".body").bounding_box()
    assert left is not None
    assert right is not None
    assert left["x"] + left["width"] <= right["x"]
    # The tokens of the other version show their alternatives, but the visible version continues.
    other.locator(".token").nth(2).hover()
    expect(answered.find(".alternatives-head")).to_contain_text("maybe")
    expect(answered.find(".alternatives button")).to_have_count(0)
    answered.press("compare")
    expect(other).to_have_count(0)
    answered.press("compare")
    expect(other).to_have_count(1)
    answered.press("previous")
    expect(other).to_have_count(0)
    expect(answered.answer().locator(".math .katex")).to_have_count(1)


def test_a_conversation_is_shared_as_one_file(answered: ChatPage, tmp_path: Path) -> None:
    with answered.page.expect_download() as download:
        answered.find("[data-key=share]").click()
    assert download.value.suggested_filename == "How-sure-certain.html"
    file = tmp_path / "shared.html"
    download.value.save_as(file)
    text = file.read_text()
    assert "<script" not in text
    page = answered.page.context.new_page()
    loaded: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.goto(file.as_uri())
    assert loaded == [file.as_uri()]
    assert problems == []
    expect(page).to_have_title('How <sure> & "certain"?')
    expect(page.locator(".user-text")).to_have_text('How <sure> & "certain"?')
    expect(page.locator(".assistant p").first).to_have_text("Sure likely maybe hardly never.")
    expect(page.locator("code .code-string")).to_have_text("'y'")
    expect(page.locator("math msup")).to_have_count(1)
    expect(page.locator("button")).to_have_count(0)
    tokens = page.locator(".assistant p").first.locator(".token")
    assert len(set(backgrounds(tokens))) == 1
    page.get_by_label("Color by certainty").check()
    assert len(set(backgrounds(tokens))) == 5
    expect(page.locator(".certainty-legend")).to_be_visible()
    shared = ChatPage(page, answered.screenshots)
    assert_accessible(shared, "a shared page")
    shared.screenshot("light-1280-shared")
    page.close()


def test_a_shared_page_names_the_attachments(chat: ChatPage, tmp_path: Path) -> None:
    chat.respond("Fine.")
    files = [tmp_path / name for name in ("a<b>.txt", "notes.md")]
    for file in files:
        file.write_text("Secret text")
    chat.find("#attach-file").set_input_files(files)
    expect(chat.find("#attachments .attachment-name")).to_have_count(2)
    chat.find("#send").click()
    chat.wait()
    with chat.page.expect_download() as download:
        chat.find("[data-key=share]").click()
    page = chat.page.context.new_page()
    shared = tmp_path / "shared.html"
    download.value.save_as(shared)
    page.goto(shared.as_uri())
    expect(page.locator(".user .column")).to_have_text("Attachments: a<b>.txt, notes.md")
    assert "Secret text" not in shared.read_text()
    assert_accessible(ChatPage(page, chat.screenshots), "a shared page with attachments")
    page.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_certainty_and_versions_are_accessible(open_chat: Callable[..., ChatPage], scheme: str, width: int) -> None:
    chat = open_chat(color_scheme=scheme, viewport={"width": width, "height": 844})
    show(chat)
    chat.press("regenerate")
    chat.wait()
    chat.press("compare")
    chat.press("certainty")
    assert_accessible(chat, "certainty and versions")
    chat.expect_width(width)
    chat.screenshot(f"{scheme}-{width}-certainty")
