"""A full context: the oldest messages are left out, with a mark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Route, expect

from conftest import TINY
from serve_process import served
from server.page.chat_page import ChatPage
from server.page.conftest import SERVE
from server.page.test_page_access import assert_accessible
from server.page.test_page_library import exported, upload

LONG = "The quick brown fox jumps over the lazy dog. " * 8
MARK = "The messages above are no longer sent to the model, because its context is full."


def limit_context(chat: ChatPage, tokens: int) -> None:
    """Reloads the page with a model whose context has this length."""

    def fulfill(route: Route) -> None:
        route.fulfill(json={"data": [{"id": "tiny", "max_model_len": tokens, "answer_defaults": {"max_tokens": 64}}]})

    chat.page.route("**/v1/models", fulfill)
    chat.open()


def sent(chat: ChatPage) -> list[str]:
    """Returns the messages of the last request, by their number."""
    return [message["content"].split()[0] for message in chat.requests[-1]["messages"]]


def test_the_oldest_messages_are_left_out(chat: ChatPage, tmp_path: Path) -> None:
    limit_context(chat, 1000)
    chat.set(system="System prompt.")
    chat.respond(LONG)
    number = 0
    while "Q0" in sent(chat) if chat.requests else True:
        assert number < 20
        chat.ask(f"Q{number} {LONG}")
        number += 1
    first = sent(chat)[1]
    assert sent(chat)[0] == "System"
    assert sent(chat)[-1] == f"Q{number - 1}"
    mark = chat.find(".trim-mark")
    expect(mark).to_have_text(MARK)
    following = "(mark) => mark.nextElementSibling.querySelector('.body').textContent.split(' ')[0]"
    assert mark.evaluate(following) == first
    expect(chat.find(".user")).to_have_count(number)
    assert_accessible(chat, "the mark")
    mark.scroll_into_view_if_needed()
    chat.screenshot("trimmed-messages")
    # The next prompt begins with the same message, so that the server's prefix cache is used.
    chat.ask(f"Q{number}")
    assert sent(chat)[1] == first
    # Another version of an early answer has its own context.
    chat.press("regenerate", chat.find(".assistant").first)
    chat.wait()
    expect(mark).to_have_count(0)
    assert sent(chat) == ["System", "Q0"]
    chat.press("previous")
    expect(mark).to_have_count(1)
    file = exported(chat, "[data-key=export]", tmp_path)
    upload(chat, file, tmp_path)
    expect(chat.find(".open-conversation")).to_have_count(2)
    assert mark.evaluate(following) == first


def counts(chat: ChatPage) -> list[str]:
    """Returns a list that receives the URLs of later requests that count tokens."""
    counted: list[str] = []
    chat.page.on("request", lambda request: counted.append(request.url) if "tokenize" in request.url else None)
    return counted


def test_a_short_conversation_is_not_counted(chat: ChatPage) -> None:
    counted = counts(chat)
    chat.set(temperature="0")
    chat.ask("What is the capital of France?")
    chat.ask("What is the capital of Italy?")
    assert len(chat.requests[-1]["messages"]) == 3
    assert counted == []
    expect(chat.find(".trim-mark")).to_have_count(0)


def test_a_conversation_whose_bytes_fit_is_not_counted(chat: ChatPage) -> None:
    """A text of this length can have three times as many bytes, which do not fit."""
    limit_context(chat, 4000)
    counted = counts(chat)
    chat.respond("Fine.")
    chat.ask(LONG * 5)
    assert len(chat.requests) == 1
    assert counted == []


def test_a_prompt_above_the_limit_of_a_body_is_too_long(chat: ChatPage) -> None:
    """`/tokenize` refuses long prompts with 400, and those above the limit of a body with 413."""
    limit_context(chat, 1000)
    chat.respond("Fine.")
    chat.ask(f"Q0 {LONG}")
    for status in (400, 413):
        with chat.page.expect_request("**/tokenize"):
            chat.respond_with_error(status, "too long", "**/tokenize")
            chat.ask(f"Q1 {LONG * 8}")
        expect(chat.find(".error")).to_have_count(0)
        assert chat.requests[-1]["messages"][-1]["content"].startswith("Q1 ")


def test_a_message_that_is_too_long_alone_is_an_error(open_chat: Callable[..., ChatPage]) -> None:
    with served(*SERVE, "--model", f"tiny={TINY}", "--max-model-len", "160") as url:
        chat = open_chat(base_url=url)
        chat.set(temperature="0", max_tokens="24")
        for number in range(8):
            assert chat.ask(f"{number}. What is the capital of France?")
            expect(chat.find(".error")).to_have_count(0)
        expect(chat.find(".trim-mark")).to_have_count(1)
        chat.send(LONG * 4)
        expect(chat.find(".error")).to_contain_text("160")
        assert chat.ask("What is the capital of Italy?")
