"""The conversations in the browser: several, renamed, deleted, as a file and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from server.page.chat_page import ChatPage

ENDLESS = json.dumps({"ignore_eos": True, "min_tokens": 1800})


@pytest.fixture
def two(chat: ChatPage) -> ChatPage:
    """Two conversations, the second one shown."""
    chat.set(temperature="0")
    chat.ask("What is the capital of France?")
    chat.at("#new").click()
    chat.ask("What is the capital of Italy?")
    return chat


def test_several_conversations_stand_side_by_side(two: ChatPage) -> None:
    two.expect_titles("What is the capital of Italy?", "What is the capital of France?")
    assert len(two.requests[-1]["messages"]) == 1
    # A new one has the settings of the one before.
    assert two.requests[-1]["temperature"] == 0
    two.at(".opener").nth(1).click()
    two.expect_messages("What is the capital of France?")
    expect(two.at(".opener[aria-current]")).to_have_text("What is the capital of France?")
    two.open()
    two.expect_messages("What is the capital of France?")


def test_a_conversation_is_renamed(two: ChatPage) -> None:
    two.at("[data-key=rename]").click()
    two.page.keyboard.type("Rome")
    two.page.keyboard.press("Enter")
    two.expect_titles("Rome", "What is the capital of France?")
    two.at("[data-key=rename]").click()
    two.page.keyboard.type("not this")
    two.page.keyboard.press("Escape")
    two.expect_titles("Rome", "What is the capital of France?")
    two.open()
    two.expect_titles("Rome", "What is the capital of France?")


def test_a_conversation_is_deleted_when_it_is_confirmed(two: ChatPage) -> None:
    two.at("[data-key=remove]").click()
    expect(two.at("#delete-title")).to_have_text("What is the capital of Italy?")
    two.page.keyboard.press("Escape")
    expect(two.at(".opener")).to_have_count(2)
    two.at("[data-key=remove]").click()
    two.at("#delete-dialog button[value=delete]").click()
    expect(two.at(".opener")).to_have_text(["What is the capital of France?"])
    two.expect_messages("What is the capital of France?")
    two.open()
    two.expect_titles("What is the capital of France?")


def test_two_tabs_do_not_write_over_each_other(two: ChatPage) -> None:
    beside = ChatPage(two.page.context.new_page(), two.screenshots)
    beside.open()
    beside.expect_messages("What is the capital of Italy?")
    beside.ask("And of Spain?")
    two.expect_messages("What is the capital of Italy?", "And of Spain?")
    two.ask("And of Japan?")
    beside.expect_messages("What is the capital of Italy?", "And of Spain?", "And of Japan?")
    assert len(two.requests[-1]["messages"]) == 5
    assert not beside.complaints


def test_two_tabs_answer_in_one_conversation(two: ChatPage) -> None:
    beside = ChatPage(two.page.context.new_page(), two.screenshots)
    beside.open()
    two.set(further=ENDLESS)
    two.send("Tell me a story.")
    expect(two.answer().locator(".body")).not_to_be_empty()
    beside.expect_messages("What is the capital of Italy?", "Tell me a story.")
    beside.set(further="", max_tokens="4")
    beside.ask("And then?")
    two.expect_messages("What is the capital of Italy?", "Tell me a story.", "And then?")
    # Longer than it takes until an answer that is being written is kept once more.
    two.page.wait_for_timeout(1500)
    two.page.keyboard.press("Escape")  # stops the answer if it is not complete
    two.wait()
    expect(beside.at(".assistant .body")).to_have_text(two.at(".assistant .body").all_text_contents())
    said = two.answers()
    assert len(said) == 3
    for tab in (two, beside):
        tab.open()
        tab.expect_messages("What is the capital of Italy?", "Tell me a story.", "And then?")
        assert tab.answers() == said
    assert not beside.complaints


def test_what_one_tab_deletes_another_does_not_bring_back(two: ChatPage) -> None:
    beside = ChatPage(two.page.context.new_page(), two.screenshots)
    beside.open()
    two.set(further=ENDLESS)
    two.send("Tell me a story.")
    expect(two.answer().locator(".body")).not_to_be_empty()
    beside.at("[data-key=remove]").click()
    beside.at("#delete-dialog button[value=delete]").click()
    two.expect_messages("What is the capital of France?")
    two.page.wait_for_timeout(1500)
    for tab in (two, beside):
        tab.open()
        tab.expect_titles("What is the capital of France?")
    assert not beside.complaints


def test_what_another_tab_says_leaves_an_edit_open(two: ChatPage) -> None:
    beside = ChatPage(two.page.context.new_page(), two.screenshots)
    beside.open()
    two.act("edit", two.at(".user"))
    two.at(".user textarea").fill("What is the capital of Japan?")
    beside.ask("And of Spain?")
    expect(two.at(".user")).to_have_count(2)
    expect(two.at(".user textarea")).to_have_value("What is the capital of Japan?")


def test_many_conversations_are_found_by_title(chat: ChatPage, tmp_path: Path) -> None:
    chat.set(temperature="0")
    chat.ask("What is the capital of France?")
    expect(chat.at("#filter")).to_be_hidden()
    file = exported(chat, "#export-all", tmp_path)
    (only,) = file["conversations"]
    file["conversations"] = [{**only, "title": f"Cat {number}"} for number in range(9)]
    upload(chat, file, tmp_path)
    expect(chat.at(".opener")).to_have_count(10)
    chat.at("#filter").fill("cat 7")
    chat.expect_titles("Cat 7")


def exported(chat: ChatPage, button: str, folder: Path) -> dict[str, Any]:
    with chat.page.expect_download() as download:
        chat.at(button).click()
    assert download.value.suggested_filename.endswith(".json")
    download.value.save_as(folder / "exported.json")
    return json.loads((folder / "exported.json").read_text())


def upload(chat: ChatPage, content: object, folder: Path) -> None:
    path = folder / "imported.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    chat.at("#import-file").set_input_files(path)


def test_export_and_import_bring_a_conversation_elsewhere(
    two: ChatPage, open_chat: Callable[..., ChatPage], tmp_path: Path
) -> None:
    two.act("regenerate")
    two.wait()
    one = exported(two, "[data-key=export]", tmp_path)
    assert [each["title"] for each in one["conversations"]] == ["What is the capital of Italy?"]
    file = exported(two, "#export-all", tmp_path)
    elsewhere = open_chat()
    upload(elsewhere, file, tmp_path)
    expect(elsewhere.at(".opener")).to_have_count(2)
    elsewhere.at(".opener").get_by_text("Italy").click()
    elsewhere.expect_messages("What is the capital of Italy?")
    assert elsewhere.answers() == two.answers()
    assert elsewhere.version() == "2/2"
    elsewhere.answer().locator(".token").first.hover()
    expect(elsewhere.at(".alternatives")).to_be_visible()
    # Imported again they are others: nothing is overwritten.
    upload(elsewhere, file, tmp_path)
    expect(elsewhere.at(".opener")).to_have_count(4)


Change = Callable[[dict[str, Any]], object]

FAULTS: dict[str, tuple[str, Change]] = {
    "another kind": ("kind has to be", lambda file: file.update(kind="notes")),
    "a later format": ("format has to be 1", lambda file: file.update(format=2)),
    "no list": ("conversations has to be a list", lambda file: file.update(conversations={})),
    "a title that is a number": ("conversations[0].title has to be text", lambda file: first(file).update(title=3)),
    "no nodes": ("conversations[0].nodes has to be an object", lambda file: first(file).update(nodes=[])),
    "a role that is none": (".role has to be user or assistant", lambda file: question(file).update(role="system")),
    "a parent that is its own": (".parent has to be", lambda file: question(file).update(parent=question(file)["id"])),
    "a parent from nowhere": (".parent has to be", lambda file: question(file).update(parent="__proto__")),
    "a prototype for a node": (
        "conversations[0].nodes.constructor has to be",
        lambda file: first(file)["nodes"].update(constructor={**question(file), "id": "constructor"}),
    ),
    "content that is a list": (".content has to be text", lambda file: question(file).update(content=["Hello"])),
    "a time that is text": ("conversations[0].updated has to be a number", lambda file: first(file).update(updated="")),
    "a temperature that is text": (
        "parameters.temperature has to be a number",
        lambda file: first(file)["parameters"].update(temperature="<img>"),
    ),
    "further fields that are the page's": (
        "parameters.further has to be without n, which the page sets",
        lambda file: first(file)["parameters"].update(further={"n": 2}),
    ),
}


def first(file: dict[str, Any]) -> dict[str, Any]:
    return file["conversations"][0]


def question(file: dict[str, Any]) -> dict[str, Any]:
    return next(iter(first(file)["nodes"].values()))


ALIGNED = """selectors => {
    const lefts = selectors.map(each => [...document.querySelectorAll(each)].at(-1).getBoundingClientRect().left);
    return Math.max(...lefts) - Math.min(...lefts) < 20;
}"""


def test_a_file_that_cannot_be_read_says_where(chat: ChatPage, tmp_path: Path) -> None:
    chat.set(temperature="0")
    chat.ask("What is the capital of France?")
    file = exported(chat, "#export-all", tmp_path)
    for name, (fault, change) in FAULTS.items():
        broken = copy.deepcopy(file)
        change(broken)
        upload(chat, broken, tmp_path)
        expect(chat.at("#notice"), name).to_contain_text(fault)
    upload(chat, "{", tmp_path)
    expect(chat.at("#notice")).to_contain_text("The file is not JSON.")
    chat.expect_titles("What is the capital of France?")
    for width in (900, 1280, 1920):
        chat.page.set_viewport_size({"width": width, "height": 800})
        # Aligned, except for a scrollbar; the browser applies the new size asynchronously.
        chat.page.wait_for_function(ALIGNED, arg=["#notice", ".assistant .body", "#composer"])
    chat.ask("What is the capital of Italy?")
    expect(chat.at("#notice")).to_be_hidden()
