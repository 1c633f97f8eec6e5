"""Incremental Markdown rendering has the same result as rendering the whole text, and parses finished blocks once."""

from __future__ import annotations

from server.page.chat_page import ChatPage

RENDERED = """
async ([text, step]) => {
  const at = (name) => import(new URL(name, document.querySelector("script[type=module]").src).href);
  const { renderMarkdown } = await at("markdown.js");
  const { Lexer } = globalThis.marked;
  const { blockTokens } = Lexer.prototype;
  let longest = 0;
  const element = document.createElement("div");
  const differing = [];
  for (let end = step; end < text.length + step; end += step) {
    const now = text.slice(0, end);
    Lexer.prototype.blockTokens = function (source, ...rest) {
      longest = Math.max(longest, source.length);
      return blockTokens.call(this, source, ...rest);
    };
    renderMarkdown(element, now, []);
    Lexer.prototype.blockTokens = blockTokens;
    const whole = document.createElement("div");
    renderMarkdown(whole, now, []);
    if (whole.innerHTML !== element.innerHTML) differing.push(now);
  }
  return { differing, longest, html: element.innerHTML };
}
"""
BLOCKS = """\
# A title

Some *words* of a paragraph with `code`
- and a list

  with a second paragraph
- of two

```python
def one():

    return 1

print(one())
```

| a | b |
|---|---|
| 1 | 2 |

> said

1. first

2. second

A heading below
===============

"""


def test_incremental_rendering_equals_rendering_the_whole_text(chat: ChatPage) -> None:
    text = BLOCKS + "See [there].\n\n[there]: https://example.com/\n\n" + BLOCKS
    assert chat.page.evaluate(RENDERED, [text, 1])["differing"] == []


def test_finished_blocks_are_not_parsed_again(chat: ChatPage) -> None:
    rendered = chat.page.evaluate(RENDERED, [BLOCKS * 30, 40])
    assert rendered["differing"] == []
    assert rendered["longest"] < 2 * len(BLOCKS)


def test_too_many_emphasis_marks_are_shown_as_text(chat: ChatPage) -> None:
    """The marked library would take minutes for these."""
    rendered = chat.page.evaluate(RENDERED, ["*a " * 50_000 + "\n\n*b*", 200_000])
    assert rendered["html"].startswith("<p>*a *a ")
    assert rendered["html"].endswith("<p><em>b</em></p>")


EMPHASIS = {
    "**注意。**请勿": "<strong>注意。</strong>请勿",
    "使用**“引号”**来": "使用<strong>“引号”</strong>来",
    "*你好。*后": "<em>你好。</em>后",
    "あ**「い」**う": "あ<strong>「い」</strong>う",
    "**한국어(영어)**는": "<strong>한국어(영어)</strong>는",
    "**`代码`。**后": "<strong><code>代码</code>。</strong>后",
    "请**看**这里": "请<strong>看</strong>这里",
    "**a (b)**c": "**a (b)**c",
    "2 * 3。* 后": "2 * 3。* 后",
    "**注意。** 请勿": "<strong>注意。</strong> 请勿",
}
"""Rendered emphasis; CommonMark has none where a mark is between punctuation and a letter."""


def test_emphasis_beside_chinese_japanese_and_korean_text(chat: ChatPage) -> None:
    for text, html in EMPHASIS.items():
        rendered = chat.page.evaluate(RENDERED, [text, 1])
        assert rendered["differing"] == []
        assert rendered["html"] == f"<p>{html}</p>", text


def test_a_list_with_an_empty_line_has_paragraphs(chat: ChatPage) -> None:
    rendered = chat.page.evaluate(RENDERED, ["- one\n- two\n\n- three\n\n1. four\n2. five\n", 1])
    assert rendered["differing"] == []
    loose = "<ul><li><p>one</p></li><li><p>two</p></li><li><p>three</p></li></ul>"
    assert rendered["html"] == f"{loose}<ol><li>four</li><li>five</li></ol>"
