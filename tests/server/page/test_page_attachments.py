"""Attachments: text and PDF files, as chips, in requests, in the search, and in exported files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from pdf_files import pdf
from server.page.chat_page import ChatPage
from server.page.test_page_access import assert_accessible
from server.page.test_page_library import exported, upload

NOTES = '<document name="notes.txt">\nBuy milk.\n</document>\n\n'
DROP = """(text) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([text], "dropped.md", { type: "text/markdown" }));
    document.getElementById("thread").dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
}"""

PASTE = """(text) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File(["Copied file"], "copied.txt", { type: "text/plain" }));
    if (text) transfer.items.add(text, "text/plain");
    const event = new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true });
    return document.getElementById("prompt").dispatchEvent(event);
}"""


def attach(chat: ChatPage, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    chat.find("#attach-file").set_input_files(path)


def test_files_are_sent_shown_found_and_exported(
    chat: ChatPage, open_chat: Callable[..., ChatPage], tmp_path: Path
) -> None:
    chat.respond("Fine.")
    attach(chat, tmp_path / "notes.txt", b"Buy milk.\n")
    chips = chat.find("#attachments .attachment-name")
    expect(chips).to_have_text(["notes.txt"])
    attach(chat, tmp_path / "paper.pdf", pdf(["On the nature", "of cats"]))
    expect(chips).to_have_text(["notes.txt", "paper.pdf"])
    assert_accessible(chat, "attachments in the composer")
    chat.screenshot("attachments-composer")
    chat.ask("What is this?")
    paper = '<document name="paper.pdf">\nOn the nature\n\nof cats\n</document>\n\n'
    assert chat.requests[-1]["messages"] == [{"role": "user", "content": f"{NOTES}{paper}What is this?"}]
    expect(chat.find("#attachments")).to_be_hidden()
    chat.expect_messages("What is this?")
    # The text is shown on demand.
    chat.find(".attachment summary").nth(1).click()
    expect(chat.find(".attachment pre")).to_have_text("On the nature\n\nof cats")
    assert_accessible(chat, "an attachment")
    chat.screenshot("attachments-message")
    # An edited message has the same attachments.
    chat.press("edit", chat.find(".user"))
    chat.find(".user textarea").fill("And this?")
    chat.page.keyboard.press("Enter")
    chat.wait()
    assert chat.requests[-1]["messages"] == [{"role": "user", "content": f"{NOTES}{paper}And this?"}]
    chat.find("#new").click()
    chat.ask("Hello")
    chat.find("#filter").fill("nature cats")
    expect(chat.find(".open-conversation")).to_have_text([re.compile("^What is this?")])
    chat.find(".open-conversation").first.click()
    expect(chat.find(".user .attachment-name")).to_have_text(["notes.txt", "paper.pdf"])
    file = exported(chat, "[data-key=export]", tmp_path)
    other = open_chat()
    upload(other, file, tmp_path)
    expect(other.find(".user .attachment-name")).to_have_text(["notes.txt", "paper.pdf"])
    node = next(iter(file["conversations"][0]["nodes"].values()))
    node["attachments"][0]["text"] = 3
    upload(other, file, tmp_path)
    expect(other.find("#notices")).to_contain_text(".attachments[0].text must be a string, got 3")


def test_attachments_are_removed_and_sent_alone(chat: ChatPage, tmp_path: Path) -> None:
    chat.respond("Fine.")
    attach(chat, tmp_path / "other.txt", b"other")
    expect(chat.find(".attachment-chip")).to_have_count(1)
    chat.page.get_by_role("button", name="Remove other.txt").click()
    expect(chat.find("#attachments")).to_be_hidden()
    chat.page.evaluate(DROP, "Dropped text")
    expect(chat.find("#attachments .attachment-name")).to_have_text(["dropped.md"])
    chat.find("#send").click()
    chat.wait()
    document = '<document name="dropped.md">\nDropped text\n</document>\n\n'
    assert chat.requests[-1]["messages"] == [{"role": "user", "content": document}]
    chat.expect_titles("dropped.md")
    expect(chat.find(".user .body")).to_be_hidden()
    chat.ask("And now?")
    assert [message["content"] for message in chat.requests[-1]["messages"]] == [document, "Fine.", "And now?"]


def test_a_pasted_file_is_attached_unless_it_accompanies_text(chat: ChatPage) -> None:
    """Word processors and spreadsheets copy a picture beside the text."""
    assert chat.page.evaluate(PASTE, "Copied text"), "the browser pastes the text"
    expect(chat.find("#attachments")).to_be_hidden()
    assert not chat.page.evaluate(PASTE, "")
    expect(chat.find("#attachments .attachment-name")).to_have_text(["copied.txt"])


UNSUITABLE = (
    ("picture.png", b"\x89PNG\r\n\x1a\n\x00", "picture.png is not a text file in UTF-8 or a PDF file"),
    ("zeros.txt", b"a\x00b", "zeros.txt is not a text file in UTF-8 or a PDF file"),
    ("empty.txt", b" \n", "empty.txt has no text"),
    ("scan.pdf", pdf([""]), "scan.pdf has no text"),
    ("broken.pdf", b"%PDF-1.4\n", "broken.pdf: the PDF file cannot be read: "),
    ("large.txt", b"a" * (9 << 20), "large.txt is too large: 9.4 MB of at most 8 MB"),
)
"""Name, content and error message of files that cannot be attached."""


def test_unsuitable_files_are_refused(chat: ChatPage, tmp_path: Path) -> None:
    for name, content, error in UNSUITABLE:
        attach(chat, tmp_path / name, content)
        expect(chat.find("#notices")).to_contain_text(error)
        expect(chat.find("#attachments")).to_be_hidden()
