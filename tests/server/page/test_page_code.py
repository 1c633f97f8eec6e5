"""Colors of code blocks: comments, strings, numbers, keywords and names of common languages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from server.page.chat_page import ChatPage
from server.page.test_page_access import assert_accessible

HIGHLIGHTED = """
async ([language, text]) => {
  const { highlight } = await import("./js/highlight.js");
  return highlight(text, language).map(({ start, end, kind }) => [kind, text.slice(start, end)]);
}
"""
CASES = {
    "python": ('def f(x):\n    return f"a{x}" + 1.5e3  # "no"\n', "keyword:def function:f keyword:return"),
    "py": ('"""one\ntwo""" @x', 'string:"""one\ntwo"""'),
    "rust": ("let x: &'a str = 'c'; // hi\n1u32", "keyword:let keyword:str string:'c' comment:// hi number:1u32"),
    "json": ('{"a": [true, "b"]}', 'name:"a" keyword:true string:"b"'),
    "html": ("<!-- <p> --><a href='x'>it's</a>", "comment:<!-- <p> --> keyword:<a name:href string:'x' keyword:>"),
    "yaml": ("- a: 'x' # c\n", "name:a string:'x' comment:# c"),
    "TOML": ("[s]\na = 1\n", "keyword:[s] name:a number:1"),
    "sql": ("select 'it''s' -- c\n", "keyword:select string:'it' string:'s' comment:-- c"),
    "sh": ('echo "$f" $x # c\na=b#c', 'keyword:echo string:"$f" name:$x comment:# c'),
    "diff": ("+a\n-b\n@@ 1\n c", "string:+a deleted:-b comment:@@ 1"),
    "css": ("a { color: #fff } /* c", "name:color number:#fff comment:/* c"),
    "tsx": ("const f = `a${x}`; // c", "keyword:const string:`a${x}` comment:// c"),
    "c++": ("#include <a>\nint f() { /* open", "meta:#include keyword:int function:f comment:/* open"),
    "unknown": ("def f(): pass", ""),
}
TEXT = """\
Here:

```python
@cached
def area(radius: float) -> float:
    \"\"\"Returns the area.\"\"\"
    return 3.14 * radius**2  # pi r^2

print(f"{area(2)}")
```

```json
{"name": "ferrule", "stars": 5, "open": true}
```

```diff
-old
+new
```

```
plain text: def return "x"
```
"""


def show(chat: ChatPage, *pieces: str) -> None:
    """Shows an answer of these tokens."""
    chat.respond(*pieces)
    chat.ask("Hello")


def test_parts_of_code_are_found(chat: ChatPage) -> None:
    for language, (text, expected) in CASES.items():
        found = chat.page.evaluate(HIGHLIGHTED, [language, text])
        assert " ".join(f"{kind}:{part}" for kind, part in found).startswith(expected), language
        assert bool(found) == bool(expected), language


def test_complete_code_blocks_are_colored(chat: ChatPage) -> None:
    show(chat, TEXT)
    blocks = chat.answer().locator(".code code")
    expect(blocks.nth(0).locator(".code-keyword")).to_have_text(["def", "return"])
    expect(blocks.nth(0).locator(".code-comment")).to_have_text(["# pi r^2"])
    expect(blocks.nth(0).locator(".code-meta")).to_have_text(["@cached"])
    expect(blocks.nth(2).locator(".code-deleted")).to_have_text(["-old"])
    expect(blocks.nth(3).locator("[class^=code-]")).to_have_count(0)
    expected = TEXT.split("```python\n")[1].split("```", maxsplit=1)[0].rstrip("\n")
    assert blocks.nth(0).text_content() == expected


def test_an_unclosed_block_is_plain_until_it_is_closed(chat: ChatPage) -> None:
    show(chat, "```python\ndef one():\n", "    return 1\n")
    expect(chat.answer().locator(".code-keyword")).to_have_count(0)
    chat.page.unroute_all()
    show(chat, "```python\ndef one():\n", "    return 1\n", "```")
    expect(chat.answer().locator(".code-keyword")).to_have_text(["def", "return"])


def test_tokens_keep_their_alternatives(chat: ChatPage) -> None:
    show(chat, "```python\nde", "f o", "ne():", "\n    return 1\n```")
    code = chat.answer().locator("code")
    assert code.locator(".token").all_text_contents() == ["de", "f o", "ne():", "\n", "    return 1"]
    expect(code.locator(".code-keyword")).to_have_text(["de", "f", "return"])
    code.locator(".code-function").last.hover()
    expect(chat.find(".alternatives-head")).to_contain_text("ne():")


def test_long_code_is_colored_in_linear_time(chat: ChatPage) -> None:
    """A quadratic expression would need minutes; waiting ends with the timeout of the page, as evaluating does not."""
    for language in ("python", "html", "rust", "css", "yaml", "bash", "json"):
        for part in ("'", '"', "`", "/*", "<", "a", " ", "-", "{", "\\", "1_", '"a', "<!--", " a", "${", "#["):
            chat.page.wait_for_function(HIGHLIGHTED, arg=[language, part * (90_000 // len(part))])


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_colors_have_contrast(open_chat: Callable[..., ChatPage], scheme: str, width: int) -> None:
    chat = open_chat(color_scheme=scheme, viewport={"width": width, "height": 844})
    show(chat, TEXT)
    assert_accessible(chat, "code")
    chat.screenshot(f"{scheme}-{width}-code")
