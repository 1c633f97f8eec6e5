"""Incremental Markdown rendering has the same result as rendering the whole text, and parses finished blocks once."""

from __future__ import annotations

from server.page.chat_page import ChatPage

RENDERED = """
async ([text, step]) => {
  const at = (name) => import(new URL(name, document.querySelector("script[type=module]").src).href);
  const { renderMarkdown } = await at("markdown.js");
  const { Lexer } = await at("../vendor/marked.esm.js");
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
