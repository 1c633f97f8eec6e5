"""Output of models and servers is text: it runs nothing, loads nothing and hides nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from serve_process import served
from server.page.chat_page import TIMEOUT, ChatPage, stream
from server.page.conftest import SERVE

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
    chat.fulfil(*HOSTILE.splitlines(keepends=True))
    chat.page.on("request", lambda request: loaded.append(request.url))
    chat.ask("Hello")
    body = chat.at(".assistant .body")
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
    # It is shown as the text that it is.
    for text in ("<script>document.title", "<img src=x onerror=", "<iframe srcdoc", "relative"):
        assert text in body.inner_text()
    for element in body.locator("span, strong, td").all():
        element.dispatch_event("click")
    expect(chat.page).to_have_title("Hello · ferrule")
    assert [url for url in loaded if "completions" not in url] == []


@pytest.mark.parametrize(
    "text",
    [">" * 20_000, "[" * 20_000, "*" * 20_000, "- " * 3_000 + "x", "`" * 20_001, "<" * 20_000, "&" * 20_000],
    ids=["quotes", "brackets", "stars", "lists", "ticks", "angles", "ampersands"],
)
def test_markdown_that_would_hang_a_reader_is_shown(chat: ChatPage, text: str) -> None:
    chat.fulfil(text[:10], text[10:])
    chat.ask("Hello")
    chat.fulfil("Fine.")
    assert chat.ask("Still there?") == "Fine."


def test_nothing_of_a_message_is_markup(chat: ChatPage) -> None:
    said = "<b>bold</b> **stars** <script>document.title = 'taken'</script>"
    chat.fulfil("Yes.")
    chat.ask(said)
    chat.expect_messages(said)
    chat.expect_titles(f"{said[:59].rstrip()}…")
    expect(chat.at(".user .body *")).to_have_count(0)


def test_the_policy_lets_nothing_in(chat: ChatPage) -> None:
    policy = chat.page.request.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    refused = chat.page.evaluate(
        """() => {
            const tries = [
                () => (document.body.innerHTML += "<p>x</p>"),
                () => eval("1"),
                () => new Function("1"),
                () => (document.createElement("script").text = "1"),
            ];
            const refused = (attempt) => { try { attempt(); return false; } catch { return true; } };
            // What Playwright itself calls may evaluate; what is called later may not.
            return new Promise((resolve) => setTimeout(() => resolve(tries.map(refused))));
        }"""
    )
    assert refused == [True] * 4
    # The browser reports this, as expected.
    chat.complaints.clear()


def test_a_refusal_is_shown_in_the_servers_words(chat: ChatPage) -> None:
    chat.set(further='{"nonsense": 3}')
    chat.send("Hello")
    refusal = chat.at(".refusal")
    expect(refusal).to_contain_text("nonsense")
    expect(refusal).to_contain_text("400")
    expect(refusal).to_have_attribute("role", "alert")
    # Asked again it takes the place of what was refused.
    chat.set(further="", temperature="0")
    refusal.get_by_role("button").click()
    chat.wait()
    expect(refusal).to_have_count(0)
    expect(chat.answer().locator(".branch")).to_have_count(0)
    assert chat.answers()[-1]


def test_a_fault_in_mid_stream_keeps_what_was_said(chat: ChatPage) -> None:
    chat.fulfil("Once ", "upon", error={"message": "the logits are not numbers", "type": "server_error", "code": 500})
    chat.send("Hello")
    expect(chat.at(".refusal")).to_contain_text("the logits are not numbers")
    assert chat.answers() == ["Once upon"]
    chat.page.unroute("**/v1/chat/completions")
    cut = stream(["Once "]).removesuffix("data: [DONE]\n\n")
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
    chat.act("regenerate")
    expect(chat.at(".refusal")).to_contain_text("The stream ended before the answer did.")


def test_a_connection_that_breaks_in_mid_stream_is_said_to(chat: ChatPage) -> None:
    event = stream(["Once "]).partition("\n\n")[0].encode() + b"\n\n"
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
        expect(chat.at(".assistant .body")).to_have_text("Once ")
        was_shown.set()
        breaking.join()
    expect(chat.at(".refusal")).to_contain_text("The stream ended before the answer did.")
    assert chat.answers() == ["Once"]


def test_a_server_that_is_gone_is_said_to_be(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    chat.page.route("**/v1/**", lambda route: route.abort())
    chat.send("Hello")
    expect(chat.at(".refusal")).to_contain_text("The server cannot be reached.")
    chat.page.reload()
    expect(chat.at("#notice")).to_contain_text("The server cannot be reached.")
    chat.page.unroute_all()
    chat.at("#notice").get_by_role("button", name="Try again").click()
    expect(chat.at("#model option")).to_have_count(2)
    expect(chat.at("#notice")).to_be_hidden()


def test_a_server_that_still_loads_is_asked_again(chat: ChatPage) -> None:
    chat.refuse(503, "the model is loading", "**/v1/models")
    chat.page.reload()
    expect(chat.at("#notice")).to_contain_text("the model is loading")
    chat.page.unroute_all()
    expect(chat.at("#model option")).to_have_count(2)
    expect(chat.at("#notice")).to_be_hidden()


def test_a_server_with_keys_is_used_with_what_the_browser_asked_for(open_chat: Callable[..., ChatPage]) -> None:
    with served(*SERVE, "--api-key", "secret") as url:
        chat = open_chat(base_url=url, http_credentials={"username": "", "password": "secret"})
        assert chat.ask("Hello")


def test_the_key_is_asked_for_and_sent(chat: ChatPage) -> None:
    chat.refuse(401, "a key is needed", "**/v1/models")
    chat.page.reload()
    dialog = chat.at("#key-dialog")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("a key is needed")
    chat.page.unroute("**/v1/models")
    keys: list[str | None] = []
    chat.page.on("request", lambda request: keys.append(request.headers.get("authorization")))
    chat.at("#key").fill("secret")
    chat.page.keyboard.press("Enter")
    expect(chat.at("#model option")).to_have_count(2)
    expect(dialog).to_be_hidden()
    chat.ask("Hello")
    assert set(keys) == {"Bearer secret"}
    assert "secret" not in chat.page.evaluate("JSON.stringify(localStorage)")
