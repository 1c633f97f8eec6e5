"""Presets, the large field of the system prompt, and the upgrade of the database."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from server.page.chat_page import ChatPage
from server.page.test_page_access import assert_accessible

OLD_DATABASE = """([version, conversation]) => new Promise((resolve, reject) => {
    const deleted = indexedDB.deleteDatabase("ferrule");
    deleted.onsuccess = () => {
        const opened = indexedDB.open("ferrule", version);
        opened.onupgradeneeded = () => {
            const store = opened.result.createObjectStore("conversations", { keyPath: "id" });
            store.createIndex("listing", ["updated", "title"]);
            if (version > 1) {
                store.createIndex("pinned", "pinned");
                opened.result.createObjectStore("presets", { keyPath: "name" });
            }
            store.put(conversation);
        };
        opened.onsuccess = () => { opened.result.close(); resolve(); };
        opened.onerror = reject;
    };
    deleted.onerror = reject;
})"""


def save_preset(chat: ChatPage, name: str) -> None:
    """Saves the settings of the conversation, whose sidebar is open."""
    chat.find("#settings").get_by_role("button", name="Save as preset").click()
    chat.find("#preset-name").fill(name)
    chat.find("#preset-dialog button[value=save]").click()
    expect(chat.find("#preset")).to_have_value(name)


def test_presets_are_saved_applied_and_deleted(chat: ChatPage) -> None:
    chat.set(system="You are a pirate.", temperature="1.2", stop="Arr")
    chat.find("#open-settings").click()
    preset = chat.find("#preset")
    expect(preset).to_have_value("")
    save_preset(chat, "Pirate")
    chat.find("#temperature").fill("0.3")
    expect(preset).to_have_value("")
    chat.find("#system").fill("You are brief.")
    save_preset(chat, "Brief")
    chat.reload()
    chat.find("#open-settings").click()
    expect(preset.locator("option")).to_have_text(["None", "Brief", "Pirate"])
    preset.select_option("Pirate")
    expect(chat.find("#system")).to_have_value("You are a pirate.")
    expect(chat.find("#temperature")).to_have_value("1.2")
    expect(chat.find("#stop")).to_have_value("Arr")
    chat.respond("Aye.")
    chat.ask("Hello")
    assert chat.requests[-1]["messages"][0]["content"] == "You are a pirate."
    assert (chat.requests[-1]["temperature"], chat.requests[-1]["stop"]) == (1.2, ["Arr"])
    # A changed conversation leaves its preset as it was.
    chat.find("#temperature").fill("2")
    preset.select_option("Pirate")
    expect(chat.find("#temperature")).to_have_value("1.2")
    chat.find("#settings").get_by_role("button", name="Delete preset").click()
    expect(chat.find("#delete-question")).to_have_text("Delete this preset?")
    chat.find("#delete-dialog button[value=delete]").click()
    expect(preset.locator("option")).to_have_text(["None", "Brief"])
    expect(chat.find("#temperature")).to_have_value("1.2")
    preset.select_option("Brief")
    preset.select_option("")
    expect(chat.find("#system")).to_have_value("")


def test_a_preset_of_the_same_name_is_replaced(chat: ChatPage) -> None:
    chat.set(system="One")
    chat.find("#open-settings").click()
    save_preset(chat, "Mine")
    chat.find("#system").fill("Two")
    chat.find("#settings").get_by_role("button", name="Save as preset").click()
    expect(chat.find("#preset-replaced")).to_be_hidden()
    chat.find("#preset-name").fill("Mine")
    expect(chat.find("#preset-replaced")).to_be_visible()
    assert_accessible(chat, "the name of a preset")
    chat.page.keyboard.press("Enter")
    expect(chat.find("#preset")).to_have_value("Mine")
    expect(chat.find("#preset option")).to_have_count(2)
    # Without a name nothing is saved.
    chat.find("#settings").get_by_role("button", name="Save as preset").click()
    chat.find("#preset-name").fill("Other")
    chat.page.keyboard.press("Escape")
    expect(chat.find("#preset option")).to_have_count(2)


def test_other_tabs_have_new_presets(chat: ChatPage) -> None:
    other = ChatPage(chat.page.context.new_page(), chat.screenshots)
    other.open()
    chat.set(system="One")
    chat.find("#open-settings").click()
    save_preset(chat, "Mine")
    expect(other.find("#preset option")).to_have_text(["None", "Mine"])
    assert not other.errors


def test_the_system_prompt_is_edited_in_a_large_field(chat: ChatPage) -> None:
    chat.find("#open-settings").click()
    chat.find("#settings").get_by_role("button", name="Enlarge").click()
    large = chat.find("#large-text")
    expect(large).to_be_focused()
    box = large.bounding_box()
    assert box is not None
    assert box["width"] > 800
    assert box["height"] > 400
    large.fill("You are\nverbose.")
    assert_accessible(chat, "the large field")
    chat.screenshot("large-system-prompt")
    chat.page.keyboard.press("Escape")
    expect(chat.find("#system")).to_have_value("You are\nverbose.")
    chat.ask("Hello")
    assert chat.requests[-1]["messages"][0]["content"] == "You are\nverbose."


@pytest.mark.parametrize("version", [1, 3])
def test_an_older_database_keeps_its_conversations(open_chat: Callable[..., ChatPage], version: int) -> None:
    chat = open_chat()
    identifier = "0" * 32
    message = {"id": identifier, "parent": None, "role": "user", "content": "Old times", "created": 1}
    common = {"title": "Old times", "created": 1, "updated": 1, "model": None, "system": "", "parameters": {}}
    token = {"text": "Fine times", "logprob": -0.1, "top": [["Fine times", -0.1]]}
    answer = {"id": "2" * 32, "parent": identifier, "role": "assistant", "content": "Fine times", "created": 2}
    ended = {"model": "tiny", "reasoning": "", "statistics": None, "finishReason": "stop", "error": None}
    # Version 1 has the tokens of an answer as a list, version 3 as a text.
    tokens = [token] if version == 1 else json.dumps([token])
    nodes = {identifier: message, answer["id"]: {**answer, **ended, "tokens": tokens}}
    # A page without scripts has no connection to the database.
    chat.page.goto("/img/ferrule.svg")
    conversation = {**common, "format": 1, "id": "1" * 32, "nodes": nodes, "selected": {"": identifier}}
    chat.page.evaluate(OLD_DATABASE, [version, conversation])
    chat.open()
    chat.expect_titles("Old times")
    chat.expect_messages("Old times")
    chat.set(system="New")
    chat.reload()
    chat.expect_answers("Fine times")
    chat.answer().locator(".token").hover()
    expect(chat.find(".alternatives-head")).to_contain_text("Fine␣times")
    chat.find("#open-settings").click()
    save_preset(chat, "New")
