"""Presets, the large field of the system prompt, and the upgrade of the database."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, expect

from server.page.chat_page import ChatPage
from server.page.test_page_access import assert_accessible

OLD_DATABASE = """([version, conversations]) => new Promise((resolve, reject) => {
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
            for (const each of conversations) store.put(each);
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


def presets_file(*presets: dict[str, Any], **fields: Any) -> FilePayload:
    """Returns a file of presets; `fields` replace those of the file."""
    content = {"kind": "ferrule presets", "format": 1, "presets": presets, **fields}
    return {"name": "presets.json", "mimeType": "application/json", "buffer": json.dumps(content).encode()}


def test_presets_are_exported_and_imported(chat: ChatPage, open_chat: Callable[..., ChatPage], tmp_path: Path) -> None:
    chat.set(system="You are a pirate.", temperature="1.2", stop="Arr", extra_body='{"ignore_eos": true}')
    chat.find("#open-settings").click()
    export = chat.find("#settings").get_by_role("button", name="Export presets")
    expect(export).to_be_disabled()
    save_preset(chat, "Pirate")
    assert_accessible(chat, "the settings with a preset")
    chat.screenshot("presets")
    with chat.page.expect_download() as download:
        export.click()
    assert download.value.suggested_filename == "ferrule-presets.json"
    path = tmp_path / "presets.json"
    download.value.save_as(path)
    exported = json.loads(path.read_text())
    parameters = {"temperature": 1.2, "stop": ["Arr"], "extra_body": {"ignore_eos": True}}
    assert exported["presets"] == [{"name": "Pirate", "system": "You are a pirate.", "parameters": parameters}]

    other = open_chat()
    other.find("#open-settings").click()
    options = other.find("#preset option")
    with other.page.expect_file_chooser() as chooser:
        other.find("#settings").get_by_role("button", name="Import presets").click()
    chooser.value.set_files(path)
    expect(options).to_have_text(["None", "Pirate"])
    other.find("#preset").select_option("Pirate")
    expect(other.find("#system")).to_have_value("You are a pirate.")
    expect(other.find("#temperature")).to_have_value("1.2")
    # An existing preset is not added again, and not replaced by another of its name.
    brief = {"name": "Brief", "system": "You are brief.", "parameters": {}}
    other.find("#presets-file").set_input_files(
        presets_file({**brief, "name": "Pirate"}, exported["presets"][0], brief)
    )
    expect(other.find("#presets-error")).to_contain_text(
        "presets[1].name must be different from those of earlier presets"
    )
    other.find("#presets-file").set_input_files(presets_file({**brief, "name": "Pirate"}, brief))
    expect(options).to_have_text(["None", "Brief", "Pirate", "Pirate (2)"])
    expect(other.find("#presets-error")).to_be_empty()
    other.find("#presets-file").set_input_files(path)
    expect(other.find("#announcements")).to_contain_text("Presets imported: 1")
    other.find("#preset").select_option("Pirate (2)")
    expect(other.find("#system")).to_have_value("You are brief.")
    expect(options).to_have_count(4)


def test_a_long_name_that_gets_a_number_stays_within_its_limit(chat: ChatPage) -> None:
    chat.find("#open-settings").click()
    names = ["None", "n" * 98]
    for system in ("One", "Two"):
        preset = {"name": "n" * 98, "system": system, "parameters": {}}
        chat.find("#presets-file").set_input_files(presets_file(preset))
        expect(chat.find("#preset option")).to_have_text(names)
        names.insert(1, "n" * 96 + " (2)")


BAD_PRESETS = {
    'kind must be "ferrule presets", got "ferrule conversations"': presets_file(kind="ferrule conversations"),
    "format must be 1, got 2": presets_file(format=2),
    "presets must be a list, got {}": presets_file(presets={}),
    "presets[0] must be an object, got 3": presets_file(presets=[3]),
    'presets[0].name must be a text of 1 to 100 characters, got " "': presets_file({"name": " "}),
    "presets[0].system must be a string, got nothing": presets_file({"name": "A", "parameters": {}}),
    "presets[0].parameters must be an object, got nothing": presets_file({"name": "A", "system": ""}),
    "presets[0].parameters.top_p must be a number from 0 to 1, got 2": presets_file(
        {"name": "A", "system": "", "parameters": {"top_p": 2}}
    ),
    "presets[0].parameters.seed must be an integer >= 0, got 0.5": presets_file(
        {"name": "A", "system": "", "parameters": {"seed": 0.5}}
    ),
    "presets[0].parameters.stop must be a list": presets_file({"name": "A", "system": "", "parameters": {"stop": "x"}}),
    "presets[0].parameters.extra_body must be an object": presets_file(
        {"name": "A", "system": "", "parameters": {"extra_body": []}}
    ),
    "presets[0].parameters must be without temprature, which is not a parameter": presets_file(
        {"name": "A", "system": "", "parameters": {"temprature": 1}}
    ),
}


def test_an_invalid_file_of_presets_is_rejected(chat: ChatPage) -> None:
    chat.find("#open-settings").click()
    for error, file in BAD_PRESETS.items():
        chat.find("#presets-file").set_input_files(file)
        expect(chat.find("#presets-error")).to_contain_text(f"The file is invalid: {error}")
    chat.find("#presets-file").set_input_files({"name": "a.json", "mimeType": "application/json", "buffer": b"{"})
    expect(chat.find("#presets-error")).to_contain_text("The file is not valid JSON: ")
    expect(chat.find("#preset option")).to_have_text(["None"])
    assert_accessible(chat, "an invalid file of presets")


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
    damaged = {**common, "format": 1, "id": "3" * 32, "title": "Damaged", "updated": 0}
    chat.page.evaluate(OLD_DATABASE, [version, [conversation, damaged]])
    chat.open()
    chat.expect_titles("Old times", "Damaged")
    chat.expect_messages("Old times")
    chat.set(system="New")
    chat.reload()
    chat.expect_answers("Fine times")
    chat.answer().locator(".token").hover()
    expect(chat.find(".alternatives-head")).to_contain_text("Fine␣times")
    chat.find("#open-settings").click()
    save_preset(chat, "New")
