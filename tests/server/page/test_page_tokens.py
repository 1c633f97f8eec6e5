"""Token alternatives: shown by pointer and keyboard, and selected to continue an answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from server.page.chat_page import ChatPage

CAPITAL = "What is the capital of France?"


@pytest.fixture
def answered(chat: ChatPage) -> ChatPage:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    return chat


def test_the_card_shows_the_logprobs_of_the_server(answered: ChatPage) -> None:
    body = {**answered.requests[-1], "stream": False}
    del body["stream_options"]
    response = answered.page.request.post("/v1/chat/completions", data=body).json()
    entry = response["choices"][0]["logprobs"]["content"][1]
    token = answered.find(".assistant .token").nth(1)
    expect(token).to_have_text(entry["token"])
    token.hover()
    card = answered.find(".alternatives")
    expected = [other["token"].replace(" ", "␣") for other in entry["top_logprobs"]]
    expect(card.locator(".alternative-text")).to_have_text(expected)
    percent = answered.page.evaluate(
        """async (logprobs) => {
            const { formatPercent, probability } = await import("./js/tokens.js");
            return logprobs.map((logprob) => formatPercent(probability(logprob)));
        }""",
        [other["logprob"] for other in entry["top_logprobs"]],
    )
    assert card.locator(".probability").all_inner_texts() == percent
    expect(card.locator(".sampled")).to_contain_text("␣capital")
    assert any("<" in each for each in percent)
    heights = card.locator(".probability").evaluate_all("shares => shares.map((share) => share.offsetHeight)")
    assert len(set(heights)) == 1, "every row has one line"
    answered.page.mouse.move(5, 5)
    expect(card).to_be_hidden()


def test_selecting_another_token_continues_the_answer(answered: ChatPage) -> None:
    answered.find(".assistant .token").nth(1).hover()
    selected = answered.find(".alternatives button").first
    text = selected.locator(".alternative-text").inner_text()
    selected.click()
    answered.wait()
    answered.expect_version("2/2")
    prefix = f"The{text.replace('␣', ' ')}"
    assert answered.answers()[-1].startswith(prefix)
    assert answered.requests[-1]["messages"][-1] == {"role": "assistant", "content": prefix}
    assert answered.requests[-1]["continue_final_message"] is True
    # The tokens of both parts have alternatives.
    spelled = "".join(answered.find(".assistant .body .token").all_text_contents())
    assert spelled == answered.answers()[-1]


def test_the_token_list_works_with_the_keyboard(answered: ChatPage) -> None:
    button = answered.answer().locator("[data-action=tokens]")
    button.focus()
    answered.page.keyboard.press("Enter")
    buttons = answered.find(".token-button")
    expect(buttons.first).to_be_focused()
    expect(buttons.first).to_have_accessible_name(re.compile(r"The, > 99\.9\s%; space The < 0\.01\s%; space \w+ <"))
    expect(buttons.last).to_have_text("<|end|>")
    answered.page.keyboard.press("ArrowRight")
    expect(buttons.nth(1)).to_be_focused()
    card = answered.find(".alternatives")
    expect(card.locator(".alternatives-head")).to_contain_text("␣capital")
    answered.page.keyboard.press("Enter")
    expect(card.locator("button").first).to_be_focused()
    answered.page.keyboard.press("ArrowDown")
    expect(card.locator("button").nth(1)).to_be_focused()
    answered.page.keyboard.press("Escape")
    expect(buttons.nth(1)).to_be_focused()
    answered.page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    answered.page.keyboard.press("End")
    expect(buttons.last).to_be_focused()
    answered.page.keyboard.press("Enter")
    answered.page.keyboard.press("Enter")
    answered.wait()
    answered.expect_version("2/2")
    assert answered.answers()[-1].startswith("The capital of France is Paris.")


def test_zero_alternatives_request_no_logprobs(chat: ChatPage) -> None:
    chat.set(alternatives="0", temperature="0")
    assert chat.ask(CAPITAL) == "The capital of France is Paris."
    assert not {"logprobs", "top_logprobs"} & chat.requests[-1].keys()
    expect(chat.find(".token")).to_have_count(0)
    expect(chat.answer().locator("[data-action=tokens]")).to_have_count(0)


MARKDOWN = [
    "# On",
    " cats\n",
    "\nThey are *very",
    " soft*, `p",
    "urr()` &amp; \\* [good](https:",
    "//example.org/good) good\n\n",
    "- one\n- t",
    "wo\n  - three\n\n> qu",
    "oted\n> twice\n\n```py\nx",
    " = 1\n```\n\n| a | b |\n|---|---|\n| c",
    " | d |\n",
]


def test_every_rendered_word_has_its_token(chat: ChatPage) -> None:
    """Rendered Markdown is split at the ends of tokens."""
    chat.respond(*MARKDOWN)
    chat.ask("Hello")
    tokens: list[dict[str, Any]] = chat.find(".assistant .token").evaluate_all(
        "(all) => all.map((one) => ({ index: Number(one.dataset.token), text: one.textContent }))"
    )
    shown = {"&": "&amp;", "*": "\\*"}
    for token in tokens:
        assert shown.get(token["text"], token["text"]) in MARKDOWN[token["index"]]
    assert {token["index"] for token in tokens} == set(range(len(MARKDOWN)))
    # All visible text has a token, and the second "good" is not that of the link.
    bare = chat.find(".assistant .body").evaluate(
        """(body) => {
            const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
            const found = [];
            while (walker.nextNode()) {
                const { parentElement: parent, data } = walker.currentNode;
                if (!parent.closest(".token, figcaption") && data.trim()) found.push(data);
            }
            return found;
        }"""
    )
    assert bare == []
    assert [token["index"] for token in tokens if "good" in token["text"]] == [4, 5]


def test_a_character_of_several_tokens_belongs_to_the_last(chat: ChatPage) -> None:
    found = chat.page.evaluate(
        """async () => {
            const { TokenReader, locateTokens } = await import("./js/tokens.js");
            const reader = new TokenReader();
            const bytes = [[104, 105, 32], [0xf0, 0x9f], [0x90], [0x88, 33]];
            const tokens = bytes.map((some) => reader.read({ token: "?", bytes: some, logprob: null }));
            const [matching, other] = ["hi 🐈!", "other"].map((content) => locateTokens(tokens, content));
            return [tokens.map(({ text }) => text), matching, other, tokens[0].logprob];
        }"""
    )
    positions = [{"index": 0, "start": 0, "end": 3, "level": 4}, {"index": 3, "start": 3, "end": 6, "level": 4}]
    assert found == [["hi ", "", "", "🐈!"], positions, [], -9999]
