"""Security: output of models and servers is text, which cannot run scripts or load resources."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from playwright.sync_api import expect

from serve_process import served
from server.page.chat_page import TIMEOUT, ChatPage, stream_body
from server.page.conftest import SERVE
from server.page.test_page_access import assert_accessible

HOSTILE = """
<script>document.title = "taken"</script>
<img src=x onerror='document.title = "taken"'>
<a href="javascript:document.title='taken'">raw</a>
<iframe srcdoc="<script>parent.document.title='taken'</script>"></iframe>
<svg onload="document.title='taken'"><style>*{display:none}</style>

[script](javascript:document.title='taken') [entity](javascript&colon;document.title='taken')
[spaced](java\tscript:document.title='taken') [data](data:text/html,<script>document.title='taken'</script>)
[vb](vbscript:x) [file](file:///etc/passwd) [relative](/v1/models) <javascript:document.title='taken'>
[fine](https://example.org/?a=1&amp;b="2") ![picture](https://example.org/p.png) ![own](/img/ferrule.svg)
[ref][1] **bold <b onclick="document.title='taken'">b</b>** `<script>` &lt;script&gt; &#60;img src=x onerror=1&#62;

[1]: javascript:document.title='taken'

```<img src=x onerror=1>
<script>document.title = "taken"</script>
```

| <script>x</script> | b |
|---|---|
| <img src=x onerror="document.title='taken'"> | [l](javascript:1) |
"""

ALLOWED = """
    DIV P H3 H4 H5 H6 UL OL LI BLOCKQUOTE HR BR A STRONG EM DEL CODE PRE FIGURE FIGCAPTION SPAN
    TABLE THEAD TBODY TR TH TD BUTTON svg path
"""


def test_hostile_markdown_does_nothing(chat: ChatPage) -> None:
    loaded: list[str] = []
    chat.respond(*HOSTILE.splitlines(keepends=True))
    chat.page.on("request", lambda request: loaded.append(request.url))
    chat.ask("Hello")
    body = chat.find(".assistant .body")
    tags = body.evaluate("(body) => [...body.querySelectorAll('*')].map((element) => element.tagName)")
    assert set(tags) <= set(ALLOWED.split())
    attributes = body.evaluate(
        "(body) => [...body.querySelectorAll('*')].flatMap((element) => element.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on") or name in {"style", "src", "srcdoc"}]
    links = body.locator("a").evaluate_all("(links) => links.map((link) => [link.textContent, link.href, link.rel])")
    assert [(text, href) for text, href, _ in links] == [
        ("fine", "https://example.org/?a=1&b=%222%22"),
        ("Image: picture", "https://example.org/p.png"),
    ]
    assert all("noopener" in rel and "noreferrer" in rel for *_, rel in links)
    # HTML is shown as text.
    for text in ("<script>document.title", "<img src=x onerror=", "<iframe srcdoc", "relative"):
        assert text in body.inner_text()
    for element in body.locator("span, strong, td").all():
        element.dispatch_event("click")
    expect(chat.page).to_have_title("Hello · ferrule")
    assert [url for url in loaded if "completions" not in url] == []


PATHOLOGICAL = (">" * 20_000, "[" * 20_000, "*" * 20_000, "- " * 3_000 + "x", "`" * 20_001, "<" * 20_000, "&" * 20_000)
"""Answers for which a careless parser of Markdown needs minutes."""


def test_pathological_markdown_does_not_hang_the_page(chat: ChatPage) -> None:
    for text in PATHOLOGICAL:
        chat.respond(text[:10], text[10:])
        chat.ask("Hello")
        chat.respond("Fine.")
        assert chat.ask("Still there?") == "Fine.", text[:10]
        chat.find("#new").click()


def test_user_messages_are_plain_text(chat: ChatPage) -> None:
    text = "<b>bold</b> **stars** <script>document.title = 'taken'</script>"
    chat.respond("Yes.")
    chat.ask(text)
    chat.expect_messages(text)
    chat.expect_titles(f"{text[:59].rstrip()}…")
    expect(chat.find(".user .body *")).to_have_count(0)


def test_the_content_security_policy_blocks_injection(chat: ChatPage) -> None:
    policy = chat.page.request.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    blocked = chat.page.evaluate(
        """() => {
            const attempts = [
                () => (document.body.innerHTML += "<p>x</p>"),
                () => eval("1"),
                () => new Function("1"),
                () => (document.createElement("script").text = "1"),
            ];
            const isBlocked = (attempt) => { try { attempt(); return false; } catch { return true; } };
            // The policy does not apply to code that Playwright evaluates, but to code that runs later.
            return new Promise((resolve) => setTimeout(() => resolve(attempts.map(isBlocked))));
        }"""
    )
    assert blocked == [True] * 4
    # The browser logs these violations, as expected.
    chat.wait_for(lambda: len(chat.errors) >= len(blocked), "the violations are logged")
    chat.errors.clear()


def test_an_error_response_shows_the_message_of_the_server(chat: ChatPage) -> None:
    chat.set(extra_body='{"min_tokens": -1}')
    chat.send("Hello")
    error = chat.find(".error")
    expect(error).to_contain_text("min_tokens")
    expect(error).to_contain_text("400")
    expect(error).to_have_attribute("role", "alert")
    # The new answer replaces the failed one.
    chat.set(extra_body="", temperature="0")
    error.get_by_role("button").click()
    chat.wait()
    expect(error).to_have_count(0)
    expect(chat.answer().locator(".version")).to_have_count(0)
    assert chat.answers()[-1]


def test_an_error_during_the_stream_keeps_the_text(chat: ChatPage) -> None:
    chat.respond("Once ", "upon", error={"message": "the logits are not numbers", "type": "server_error", "code": 500})
    chat.send("Hello")
    expect(chat.find(".error")).to_contain_text("the logits are not numbers")
    chat.expect_answers("Once upon")
    chat.page.unroute("**/v1/chat/completions")
    cut = stream_body(["Once "]).removesuffix("data: [DONE]\n\n")
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
    chat.press("regenerate")
    expect(chat.find(".error")).to_contain_text("The connection was closed before the answer was complete.")


def test_a_closed_connection_keeps_the_text_and_shows_an_error(chat: ChatPage) -> None:
    event = stream_body(["Once "]).partition("\n\n")[0].encode() + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def break_off() -> None:
            with listener.accept()[0] as client:
                client.recv(65536)
                client.sendall(head + b"%x\r\n%b\r\n" % (len(event), event))
                was_shown.wait(TIMEOUT / 1000)

        was_shown = threading.Event()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        chat.page.route("**/v1/chat/completions", lambda route: route.continue_(url=url))
        breaking = threading.Thread(target=break_off)
        breaking.start()
        chat.send("Hello")
        expect(chat.find(".assistant .body")).to_have_text("Once ")
        was_shown.set()
        breaking.join()
    expect(chat.find(".error")).to_contain_text("The connection was closed before the answer was complete.")
    chat.expect_answers("Once")


def test_an_unreachable_server_shows_an_error(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    chat.page.route("**/v1/**", lambda route: route.abort())
    chat.send("Hello")
    expect(chat.find(".error")).to_contain_text("Cannot connect to the server.")
    chat.page.reload()
    expect(chat.find("#notices")).to_contain_text("Cannot connect to the server.")
    chat.page.unroute_all()
    chat.find("#notices").get_by_role("button", name="Try again").click()
    expect(chat.find("#model option")).to_have_count(2)
    expect(chat.find(".notice")).to_have_count(0)


def test_a_database_that_cannot_be_opened_is_opened_again(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    chat.page.add_init_script(
        "const open = IDBFactory.prototype.open;"
        "IDBFactory.prototype.open = function () { IDBFactory.prototype.open = open; throw new Error('no database'); };"
    )
    chat.open()
    chat.respond("Fine.")
    chat.ask("Is this saved?")
    chat.expect_titles("Is this saved?")
    other = ChatPage(chat.page.context.new_page(), chat.screenshots)
    other.open()
    other.expect_messages("Is this saved?")
    assert not other.errors


BLOCK_STORAGE = """(() => {
    const open = IDBFactory.prototype.open;
    window.isBlocked = true;
    IDBFactory.prototype.open = function (...names) {
        if (window.isBlocked) throw new Error("no database");
        return open.apply(this, names);
    };
})()"""


def test_the_notice_on_unsaved_conversations_stays_until_one_is_saved(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    chat.page.add_init_script(BLOCK_STORAGE)
    chat.respond_with_error(503, "the model is loading", "**/v1/models")
    chat.page.reload()
    expect(chat.find(".notice")).to_have_count(2)
    assert_accessible(chat, "two notices")
    chat.screenshot("notices")
    chat.page.unroute_all()
    notice = chat.find(".notice")
    expect(notice).to_have_count(1)
    expect(notice).to_contain_text("This browser does not save conversations: no database")
    chat.respond("Fine.")
    chat.ask("Is this saved?")
    expect(notice).to_contain_text("Cannot save the conversation in this browser: no database")
    chat.page.evaluate("window.isBlocked = false")
    notice.get_by_role("button", name="Try again").click()
    expect(notice).to_have_count(0)
    chat.expect_titles("Is this saved?")
    other = ChatPage(chat.page.context.new_page(), chat.screenshots)
    other.open()
    other.expect_messages("Is this saved?")
    other.expect_answers("Fine.")
    assert not other.errors


def test_requests_to_a_loading_server_are_retried(chat: ChatPage) -> None:
    chat.respond_with_error(503, "the model is loading", "**/v1/models")
    chat.page.reload()
    expect(chat.find("#notices")).to_contain_text("the model is loading")
    chat.page.unroute_all()
    expect(chat.find("#model option")).to_have_count(2)
    expect(chat.find(".notice")).to_have_count(0)


def test_api_key_as_http_credentials(open_chat: Callable[..., ChatPage]) -> None:
    with served(*SERVE, "--api-key", "secret") as url:
        chat = open_chat(base_url=url, http_credentials={"username": "", "password": "secret"})
        assert chat.ask("Hello")


def test_api_key_dialog(chat: ChatPage) -> None:
    chat.respond_with_error(401, "a key is needed", "**/v1/models")
    chat.page.reload()
    dialog = chat.find("#api-key-dialog")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("a key is needed")
    chat.page.unroute("**/v1/models")
    keys: list[str | None] = []
    chat.page.on("request", lambda request: keys.append(request.headers.get("authorization")))
    chat.find("#api-key").fill("secret")
    chat.page.keyboard.press("Enter")
    expect(chat.find("#model option")).to_have_count(2)
    expect(dialog).to_be_hidden()
    chat.ask("Hello")
    assert set(keys) == {"Bearer secret"}
    assert "secret" not in chat.page.evaluate("JSON.stringify(localStorage)")
