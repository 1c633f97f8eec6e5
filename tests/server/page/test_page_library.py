"""Saved conversations: switch, rename, delete, search, export, import, and changes of other tabs."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import expect

from server.page.chat_page import AFTER_TRANSACTIONS, ChatPage

ENDLESS = json.dumps({"ignore_eos": True, "min_tokens": 1800})


@pytest.fixture
def two_conversations(chat: ChatPage) -> ChatPage:
    """Two conversations, of which the second is visible."""
    chat.set(temperature="0")
    chat.ask("What is the capital of France?")
    chat.find("#new").click()
    chat.ask("What is the capital of Italy?")
    return chat


@pytest.fixture
def other_tab(two_conversations: ChatPage) -> ChatPage:
    """A second tab with the same conversations."""
    tab = ChatPage(two_conversations.page.context.new_page(), two_conversations.screenshots)
    tab.open()
    return tab


def select_conversation(chat: ChatPage, title: str) -> None:
    """Opens a conversation of the list."""
    chat.find(".open-conversation").get_by_text(title).click()
    expect(chat.find(".open-conversation[aria-current]")).to_have_text(title)


def begin_endless_answer(chat: ChatPage) -> None:
    """Sends a message whose answer ends when the context is full, and waits for its first text."""
    chat.set(extra_body=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()


def test_two_conversations_are_separate(two_conversations: ChatPage) -> None:
    two_conversations.expect_titles("What is the capital of Italy?", "What is the capital of France?")
    assert len(two_conversations.requests[-1]["messages"]) == 1
    # A new conversation has the settings of the previous one.
    assert two_conversations.requests[-1]["temperature"] == 0
    select_conversation(two_conversations, "What is the capital of France?")
    two_conversations.expect_messages("What is the capital of France?")
    two_conversations.reload()
    two_conversations.expect_messages("What is the capital of France?")


def test_a_conversation_is_renamed(two_conversations: ChatPage) -> None:
    two_conversations.find("[data-key=rename]").click()
    two_conversations.page.keyboard.type("Rome")
    two_conversations.page.keyboard.press("Enter")
    two_conversations.expect_titles("Rome", "What is the capital of France?")
    two_conversations.find("[data-key=rename]").click()
    two_conversations.page.keyboard.type("not this")
    two_conversations.page.keyboard.press("Escape")
    two_conversations.expect_titles("Rome", "What is the capital of France?")
    two_conversations.reload()
    two_conversations.expect_titles("Rome", "What is the capital of France?")


def test_a_conversation_is_deleted_after_confirmation(two_conversations: ChatPage) -> None:
    two_conversations.find("[data-key=remove]").click()
    expect(two_conversations.find("#delete-title")).to_have_text("What is the capital of Italy?")
    two_conversations.page.keyboard.press("Escape")
    expect(two_conversations.find(".open-conversation")).to_have_count(2)
    two_conversations.find("[data-key=remove]").click()
    two_conversations.find("#delete-dialog button[value=delete]").click()
    expect(two_conversations.find(".open-conversation")).to_have_text(["What is the capital of France?"])
    two_conversations.expect_messages("What is the capital of France?")
    two_conversations.reload()
    two_conversations.expect_titles("What is the capital of France?")


def test_a_pinned_conversation_is_first(two_conversations: ChatPage, other_tab: ChatPage, tmp_path: Path) -> None:
    france, italy = "What is the capital of France?", "What is the capital of Italy?"
    select_conversation(two_conversations, france)
    pin = two_conversations.find("[data-key=pin]")
    expect(pin).to_have_attribute("aria-pressed", "false")
    pin.click()
    two_conversations.expect_titles(france, italy)
    expect(pin).to_have_attribute("aria-pressed", "true")
    expect(pin).to_be_focused()
    groups = "lists => lists.map(list => list.ariaLabel)"
    assert two_conversations.find("#conversations ul").evaluate_all(groups) == ["Pinned", "Today"]
    two_conversations.screenshot("pinned")
    other_tab.expect_titles(france, italy)
    # A message in another conversation does not change the order.
    other_tab.ask("And of Spain?")
    two_conversations.expect_titles(france, italy)
    file = exported(two_conversations, "[data-key=export]", tmp_path)
    upload(two_conversations, file, tmp_path)
    two_conversations.expect_titles(france, france, italy)
    two_conversations.reload()
    two_conversations.expect_titles(france, france, italy)
    two_conversations.find("[data-key=pin]").click()
    expect(two_conversations.find("[data-key=pin]")).to_have_attribute("aria-pressed", "false")
    expect(two_conversations.find("#conversations ul").first.locator("li")).to_have_count(1)
    assert not other_tab.errors


def test_two_tabs_do_not_overwrite_each_other(two_conversations: ChatPage, other_tab: ChatPage) -> None:
    other_tab.expect_messages("What is the capital of Italy?")
    other_tab.ask("And of Spain?")
    two_conversations.expect_messages("What is the capital of Italy?", "And of Spain?")
    two_conversations.expect_answers(*other_tab.answers())
    two_conversations.ask("And of Japan?")
    other_tab.expect_messages("What is the capital of Italy?", "And of Spain?", "And of Japan?")
    assert len(two_conversations.requests[-1]["messages"]) == 5
    assert not other_tab.errors


def test_two_tabs_generate_in_one_conversation(two_conversations: ChatPage, other_tab: ChatPage) -> None:
    begin_endless_answer(two_conversations)
    other_tab.expect_messages("What is the capital of Italy?", "Tell me a story.")
    other_tab.set(extra_body="", max_tokens="4")
    other_tab.ask("And then?")
    two_conversations.expect_messages("What is the capital of Italy?", "Tell me a story.", "And then?")
    expect(two_conversations.answer().locator(".body")).to_have_text(other_tab.answers()[-1], use_inner_text=True)
    # Longer than the interval at which a running answer is saved.
    two_conversations.page.wait_for_timeout(1500)
    two_conversations.page.keyboard.press("Escape")  # stops the answer if it is not complete
    two_conversations.wait()
    expect(other_tab.find(".assistant .body")).to_have_text(
        two_conversations.find(".assistant .body").all_text_contents()
    )
    answers = two_conversations.answers()
    assert len(answers) == 3
    for tab in (two_conversations, other_tab):
        tab.open()
        tab.expect_messages("What is the capital of Italy?", "Tell me a story.", "And then?")
        assert tab.answers() == answers
    assert not other_tab.errors


def test_a_tab_with_older_settings_does_not_replace_them(two_conversations: ChatPage) -> None:
    deaf = ChatPage(two_conversations.page.context.new_page(), two_conversations.screenshots)
    deaf.page.add_init_script("BroadcastChannel.prototype.addEventListener = () => {};")
    deaf.open()
    two_conversations.set(system="Be brief.", temperature="0.5")
    two_conversations.page.evaluate(AFTER_TRANSACTIONS)
    # A changed title replaces only the title.
    deaf.find("[data-key=rename]").click()
    deaf.page.keyboard.type("Capitals")
    deaf.page.keyboard.press("Enter")
    deaf.ask("And of Spain?")
    two_conversations.expect_titles("Capitals", "What is the capital of France?")
    assert deaf.requests[-1]["temperature"] == 0
    two_conversations.expect_messages("What is the capital of Italy?", "And of Spain?")
    two_conversations.reload()
    two_conversations.ask("And of Japan?")
    assert two_conversations.requests[-1]["messages"][0]["content"] == "Be brief."
    assert two_conversations.requests[-1]["temperature"] == 0.5
    assert not deaf.errors


def test_a_conversation_deleted_in_one_tab_is_not_saved_by_another(
    two_conversations: ChatPage, other_tab: ChatPage
) -> None:
    begin_endless_answer(two_conversations)
    other_tab.find("[data-key=remove]").click()
    other_tab.find("#delete-dialog button[value=delete]").click()
    two_conversations.expect_messages("What is the capital of France?")
    two_conversations.page.wait_for_timeout(1500)
    for tab in (two_conversations, other_tab):
        tab.open()
        tab.expect_titles("What is the capital of France?")
    assert not other_tab.errors


def test_a_message_of_another_tab_leaves_an_editor_open(two_conversations: ChatPage, other_tab: ChatPage) -> None:
    two_conversations.press("edit", two_conversations.find(".user"))
    two_conversations.find(".user textarea").fill("What is the capital of Japan?")
    other_tab.ask("And of Spain?")
    expect(two_conversations.find(".user")).to_have_count(2)
    expect(two_conversations.find(".user textarea")).to_have_value("What is the capital of Japan?")


TIMES = {
    "Moon": "2026-03-15T00:01",
    "Sun": "2026-03-14T23:59",
    "Mars": "2026-03-08T12:00",
    "Venus": "2026-02-13T12:00",
    "Pluto": "2025-12-31T12:00",
}
GROUPS = ["Today", "Yesterday", "Previous 7 days", "Previous 30 days", "December 2025"]


def library(titles: Iterable[str], content: str = "Hello") -> dict[str, Any]:
    """Returns a file with a conversation of one message for each title, of the times in `TIMES`."""
    conversations: list[dict[str, Any]] = []
    for title in titles:
        time = datetime.fromisoformat(TIMES[title]).replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp() * 1000
        identifier = "0" * 32
        message = {"id": identifier, "parent": None, "role": "user", "content": f"{content} {title}", "created": time}
        common = {"title": title, "created": time, "updated": time, "model": None, "system": "", "parameters": {}}
        conversations.append({**common, "nodes": {identifier: message}, "selected": {}})
    return {"kind": "ferrule conversations", "format": 1, "conversations": conversations}


def test_conversations_are_grouped_by_date(open_chat: Callable[..., ChatPage], tmp_path: Path) -> None:
    chat = open_chat(timezone_id="Europe/Berlin")
    chat.page.clock.set_fixed_time("2026-03-15T12:00:00+01:00")
    upload(chat, library(TIMES), tmp_path)
    chat.expect_titles(*TIMES)
    expect(chat.find("#conversations ul")).to_have_count(len(GROUPS))
    assert chat.find("#conversations ul").evaluate_all("lists => lists.map(list => list.ariaLabel)") == GROUPS
    chat.screenshot("conversation-dates")


def test_conversations_are_found_by_title_and_message(chat: ChatPage, tmp_path: Path) -> None:
    upload(chat, library(["Sun"], content="An old text about the planet"), tmp_path)
    chat.expect_titles("Sun")
    expect(chat.find("#filter")).to_be_hidden()
    upload(chat, library(["Mars"], content="It rains.\n" * 20 + "The cat\nsits on"), tmp_path)
    chat.expect_titles("Sun", "Mars")
    chat.find("#filter").fill("sUN")
    expect(chat.find(".open-conversation")).to_have_text([re.compile("^Sun")])
    chat.find("#filter").fill("mars Cat")
    expect(chat.find(".open-conversation")).to_have_text([re.compile("^Mars")])
    expect(chat.find(".excerpt")).to_have_text("…ains. It rains. The cat sits on Mars")
    chat.screenshot("conversation-search")
    chat.find("#filter").fill("cat planet")
    expect(chat.find("#conversations")).to_have_text("No conversations found")
    chat.find("#filter").fill("rains capital")
    expect(chat.find(".open-conversation")).to_have_count(0)
    # A new message is found, too.
    chat.respond("The capital", " of snow")
    chat.ask("Where does it snow?")
    chat.find("#filter").fill("capital snow")
    expect(chat.find(".open-conversation")).to_have_text([re.compile("^Mars")])
    chat.find("#filter").fill("")
    expect(chat.find(".open-conversation")).to_have_count(2)
    expect(chat.find(".excerpt")).to_have_count(0)


def exported(chat: ChatPage, button: str, folder: Path) -> dict[str, Any]:
    with chat.page.expect_download() as download:
        chat.find(button).click()
    assert download.value.suggested_filename.endswith(".json")
    download.value.save_as(folder / "exported.json")
    return json.loads((folder / "exported.json").read_text())


def upload(chat: ChatPage, content: object, folder: Path) -> None:
    path = folder / "imported.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    chat.find("#import-file").set_input_files(path)


def test_export_and_import(two_conversations: ChatPage, open_chat: Callable[..., ChatPage], tmp_path: Path) -> None:
    two_conversations.press("regenerate")
    two_conversations.wait()
    one = exported(two_conversations, "[data-key=export]", tmp_path)
    assert [each["title"] for each in one["conversations"]] == ["What is the capital of Italy?"]
    file = exported(two_conversations, "#export-all", tmp_path)
    elsewhere = open_chat()
    upload(elsewhere, file, tmp_path)
    expect(elsewhere.find(".open-conversation")).to_have_count(2)
    select_conversation(elsewhere, "What is the capital of Italy?")
    elsewhere.expect_messages("What is the capital of Italy?")
    elsewhere.expect_answers(*two_conversations.answers())
    elsewhere.expect_version("2/2")
    elsewhere.answer().locator(".token").first.hover()
    expect(elsewhere.find(".alternatives")).to_be_visible()
    # Every import creates new conversations.
    upload(elsewhere, file, tmp_path)
    expect(elsewhere.find(".open-conversation")).to_have_count(4)


def test_trying_a_failed_answer_again_keeps_the_messages_below_it(chat: ChatPage, tmp_path: Path) -> None:
    chat.respond_with_error(500, "no answer")
    chat.ask("One")
    chat.page.unroute_all()
    chat.respond("Fine.")
    chat.ask("Two")
    chat.find(".error button").click()
    chat.wait()
    chat.expect_messages("One")
    chat.expect_version("2/2")
    chat.press("previous")
    chat.expect_messages("One", "Two")
    chat.expect_version("1/2", chat.find(".assistant").first)
    file = exported(chat, "[data-key=export]", tmp_path)
    upload(chat, file, tmp_path)
    expect(chat.find(".open-conversation")).to_have_count(2)
    chat.expect_messages("One", "Two")
    # A failed answer without messages below it is replaced.
    chat.find("#new").click()
    chat.page.unroute_all()
    chat.respond_with_error(500, "no answer")
    chat.ask("Three")
    chat.page.unroute_all()
    chat.respond("Fine.")
    chat.find(".error button").click()
    chat.wait()
    expect(chat.answer().locator(".version")).to_have_count(0)
    chat.reload()
    chat.expect_answers("Fine.")
    expect(chat.answer().locator(".version")).to_have_count(0)


COUNT_WRITES = """(() => {
    const put = IDBObjectStore.prototype.put;
    window.written = new Set();
    IDBObjectStore.prototype.put = function (value, key) {
        if (this.name === "nodes") window.written.add(value.content);
        return put.call(this, value, key);
    };
})()"""


def test_only_changed_messages_are_saved(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    chat.page.add_init_script(COUNT_WRITES)
    chat.respond("First answer")
    chat.ask("First")
    chat.reload()
    chat.expect_messages("First")
    assert chat.page.evaluate("[...written]") == []
    chat.page.unroute_all()
    chat.respond("Second answer")
    chat.ask("Second")
    chat.page.evaluate(AFTER_TRANSACTIONS)
    assert {"Second", "Second answer"} <= set(chat.page.evaluate("[...written]")) <= {"Second", "", "Second answer"}
    chat.reload()
    chat.expect_messages("First", "Second")
    chat.expect_answers("First answer", "Second answer")


DELETE_DATABASE = """() => new Promise((resolve, reject) => {
    const deleted = indexedDB.deleteDatabase("ferrule");
    deleted.onsuccess = () => resolve();
    deleted.onerror = reject;
})"""
OPEN_NEWER_DATABASE = """() => new Promise((resolve, reject) => {
    const opened = indexedDB.open("ferrule", 1000);
    opened.onsuccess = () => { opened.result.close(); resolve(); };
    opened.onerror = reject;
})"""


def test_a_database_that_another_tab_changes_is_opened_again(chat: ChatPage) -> None:
    chat.respond("Fine.")
    chat.page.evaluate(DELETE_DATABASE)
    chat.ask("Hello")
    chat.expect_titles("Hello")
    expect(chat.find(".notice")).to_have_count(0)
    chat.page.evaluate(OPEN_NEWER_DATABASE)
    chat.ask("And now?")
    expect(chat.find(".notice")).to_contain_text("newer version of this page has changed the database; reload this tab")


FAILED_TRANSACTION = """async () => {
    const { CONVERSATIONS, NODES, resultOf, transact } = await import("./js/indexed-db.js");
    const failed = await transact([CONVERSATIONS, NODES], "readwrite", (heads, nodes) => {
        nodes.put({ id: "a" }, ["one", "a"]);
        nodes.put({ id: "b", content: () => {} }, ["one", "b"]);
    }).catch((error) => error.name);
    return [failed, await transact([NODES], "readonly", (nodes) => resultOf(nodes.count()))];
}"""


def test_a_failed_transaction_changes_nothing(chat: ChatPage) -> None:
    assert chat.page.evaluate(FAILED_TRANSACTION) == ["DataCloneError", 0]


@pytest.mark.parametrize("parent", ["1" * 32, "__proto__"])
def test_a_file_with_a_missing_parent_is_imported(chat: ChatPage, tmp_path: Path, parent: str) -> None:
    file = library(["Sun"])
    orphan = {**question(file), "id": "2" * 32, "parent": parent, "content": "Orphan"}
    first(file)["nodes"][orphan["id"]] = orphan
    upload(chat, file, tmp_path)
    chat.expect_titles("Sun")
    chat.expect_messages("Orphan")
    chat.expect_version("2/2", chat.find(".user"))


Change = Callable[[dict[str, Any]], object]

EARLIER_NODE = ".parent must be null or an earlier node, got "
FAULTS: dict[str, tuple[str, Change]] = {
    "other kind": ('kind must be "ferrule conversations", got "notes"', lambda file: file.update(kind="notes")),
    "later format": ("format must be 1, got 2", lambda file: file.update(format=2)),
    "missing list": ("conversations must be a list, got nothing", lambda file: file.pop("conversations")),
    "title": ("conversations[0].title must be a string, got 3", lambda file: first(file).update(title=3)),
    "nodes": ("conversations[0].nodes must be an object, got []", lambda file: first(file).update(nodes=[])),
    "role": ('.role must be user or assistant, got "system"', lambda file: question(file).update(role="system")),
    "cycle": (EARLIER_NODE, lambda file: question(file).update(parent=question(file)["id"])),
    "constructor as id": (
        "conversations[0].nodes.constructor must be an object with this id",
        lambda file: first(file)["nodes"].update(constructor={**question(file), "id": "constructor"}),
    ),
    "content": ('.content must be a string, got ["Hello"]', lambda file: question(file).update(content=["Hello"])),
    "time": ('conversations[0].updated must be a number, got ""', lambda file: first(file).update(updated="")),
    "temperature": (
        'parameters.temperature must be a number from 0 to 100, got "<img>"',
        lambda file: first(file)["parameters"].update(temperature="<img>"),
    ),
    "reserved field": (
        'parameters.extra_body must be without n, which the page sets, got {"n":2}',
        lambda file: first(file)["parameters"].update(extra_body={"n": 2}),
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


def test_an_invalid_file_is_rejected(chat: ChatPage, tmp_path: Path) -> None:
    chat.set(temperature="0")
    chat.ask("What is the capital of France?")
    file = exported(chat, "#export-all", tmp_path)
    for name, (error, change) in FAULTS.items():
        broken = copy.deepcopy(file)
        change(broken)
        upload(chat, broken, tmp_path)
        expect(chat.find("#notices"), name).to_contain_text(error)
    upload(chat, "{", tmp_path)
    expect(chat.find("#notices")).to_contain_text("The file is not valid JSON: ")
    # The same file again gives a new notice, which is announced.
    chat.find(".notice").evaluate("notice => { notice.dataset.old = ''; }")
    upload(chat, "{", tmp_path)
    expect(chat.find(".notice:not([data-old])")).to_contain_text("The file is not valid JSON: ")
    chat.expect_titles("What is the capital of France?")
    for width in (900, 1280, 1920):
        chat.page.set_viewport_size({"width": width, "height": 800})
        # Aligned, except for a scrollbar; the browser applies the new size asynchronously.
        chat.wait_until(ALIGNED, [".notice", ".assistant .body", "#composer"])
    chat.ask("What is the capital of Italy?")
    expect(chat.find(".notice")).to_have_count(0)
