"""An answer as it comes is shown as the whole of it would be, and read once."""

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


def test_a_stream_shows_what_the_whole_text_does(chat: ChatPage) -> None:
    text = BLOCKS + "See [there].\n\n[there]: https://example.com/\n\n" + BLOCKS
    assert chat.page.evaluate(RENDERED, [text, 1])["differing"] == []


def test_what_is_finished_is_not_read_again(chat: ChatPage) -> None:
    rendered = chat.page.evaluate(RENDERED, [BLOCKS * 30, 40])
    assert rendered["differing"] == []
    assert rendered["longest"] < 2 * len(BLOCKS)


def test_more_marks_than_can_be_read_are_shown_as_they_are(chat: ChatPage) -> None:
    """marked takes minutes for these."""
    rendered = chat.page.evaluate(RENDERED, ["*a " * 50_000 + "\n\n*b*", 200_000])
    assert rendered["html"].startswith("<p>*a *a ")
    assert rendered["html"].endswith("<p><em>b</em></p>")
