"""Formulas of answers: found in Markdown, typeset without a network, and shown as source if they are broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from server.page.chat_page import ChatPage
from server.page.test_page_access import assert_accessible

FORMULAS = """\
The energy is $E = mc^2$, where \\(c\\) is the speed of light; the $n$th root of $x_1*y$ and $x_2*y$ is left.

\\[
\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}
\\]

1. First:
   $$\\sum_{i=1}^n i = \\frac{n(n+1)}{2}$$
2. Then $\\mathbb{R}^3$.

| shape | area $\\pi r^2$ |
|---|---|
| a | $\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}$ |

$$
\\mathbf{A} = \\begin{bmatrix} a_{11} & a_{12} \\\\ a_{21} & a_{22} \\end{bmatrix}
$$
"""
NOT_FORMULAS = (
    "It costs $5 and $10, or $5-$10, or $5/$10 for 2.",
    "From $5 million to 10 million$ and US$5 or A$6.",
    "Set $HOME/bin:$PATH, and $foo and bar$.",
    "Escaped: 5\\$ and 6\\$.",
    "Code: `$x$` and `\\(y\\)`.",
    "Brackets \\[not a link\\] and \\(optional words\\).",
    "Costs $ 5 $ each, $$ twice.",
    "    $$\n    indented code\n    $$",
)
HOSTILE = (
    "$\\href{javascript:document.title='taken'}{x}$",
    "$\\includegraphics{https://example.org/p.png}$",
    "$\\htmlStyle{position:fixed}{x}$ $\\htmlData{a=b}{y}$ $\\htmlClass{z}{z}$",
    "$\\text{<img src=x onerror=1>}$",
    "$\\def\\a{\\a\\a}\\a$",
    "$\\rule{9999em}{9999em}$",
)


def show(chat: ChatPage, text: str) -> None:
    """Shows an answer, streamed in pieces of a few characters."""
    chat.page.unroute_all()
    chat.respond(*(text[at : at + 7] for at in range(0, len(text), 7)))
    chat.ask("Hello")


def test_formulas_are_typeset(chat: ChatPage) -> None:
    show(chat, FORMULAS)
    body = chat.answer().locator(".body")
    expect(body.locator(".katex")).to_have_count(11)
    expect(body.locator(".katex-display")).to_have_count(3)
    expect(body.locator(".math-source")).to_have_count(0)
    # Screen readers read MathML; KaTeX hides the other elements from them.
    assert "<mi>m</mi><msup><mi>c</mi><mn>2</mn></msup>" in body.locator("math").first.inner_html()
    expect(body.locator("em")).to_have_count(0)
    # The fonts of the formulas are loaded, some of them later than the others.
    chat.wait_until("[...document.fonts].filter(({ status }) => status === 'loaded').length >= 4")


def test_prices_and_escapes_are_not_formulas(chat: ChatPage) -> None:
    for text in NOT_FORMULAS:
        show(chat, text)
        expect(chat.answer().locator(".math, .math-line, .math-block")).to_have_count(0)
    expect(chat.find(".assistant .body").locator(".math, .math-line, .math-block")).to_have_count(0)


def test_a_broken_formula_shows_its_source(chat: ChatPage) -> None:
    show(chat, "Here $\\frac{1}{$ and $$\\nosuchcommand{x}$$ there $y^2$.")
    body = chat.answer().locator(".body")
    expect(body.locator(".katex")).to_have_count(1)
    expect(body.locator(".math-source")).to_have_text(["$\\frac{1}{$", "$$\\nosuchcommand{x}$$"])


def test_formulas_cannot_load_or_run_anything(chat: ChatPage) -> None:
    show(chat, "$x^2$")
    expect(chat.answer().locator(".katex")).to_have_count(1)
    loaded: list[str] = []
    chat.page.on("request", lambda request: loaded.append(request.url))
    for text in HOSTILE:
        show(chat, text)
        body = chat.answer().locator(".body")
        expect(body.locator("a, img, script")).to_have_count(0)
        expect(body.locator("[onerror], [data-a], .z")).to_have_count(0)
        assert body.evaluate("(body) => body.scrollHeight") < 2000
    expect(chat.find(".assistant .body").locator("a, img, script, [onerror], [data-a], .z")).to_have_count(0)
    # The style sheet of KaTeX names its font files, which are loaded when they are needed.
    assert [url for url in loaded if "completions" not in url and "/vendor/katex/fonts/" not in url] == []
    expect(chat.page).to_have_title("Hello · ferrule")


def test_a_formula_does_not_flicker_while_it_is_streamed(chat: ChatPage) -> None:
    """Until it is complete, a formula is its source, without emphasis; then it stays typeset."""
    show(chat, "$x$")
    seen = chat.page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("./js/markdown.js");
          const element = document.createElement("div");
          const states = [];
          for (let end = 1; end <= text.length; end++) {
            renderMarkdown(element, text.slice(0, end), []);
            const block = element.querySelector(".math-block");
            const state = block?.querySelector(".katex") ? "formula" : block ? "source" : "text";
            const hasEmphasis = element.querySelector("em") !== null;
            if (states.at(-1) !== state) states.push(state);
            if (hasEmphasis) states.push("emphasis");
          }
          return states;
        }""",
        "Text\n\n$$\na_1 *b* c_3\n$$\n\nSome words more and $5.\n",
    )
    assert seen == ["text", "source", "formula"]


def test_a_page_without_formulas_does_not_load_katex(chat: ChatPage) -> None:
    loaded: list[str] = []
    chat.page.on("request", lambda request: loaded.append(request.url))
    show(chat, "No formula here.")
    assert not [url for url in loaded if "katex" in url]


def test_many_delimiters_do_not_hang_the_page(chat: ChatPage) -> None:
    for text in ("$" * 20_000, "$x" * 10_000, "\\(" * 10_000, "\n$$\n" * 5_000, "\\[" * 10_000):
        chat.respond(text[:10], text[10:])
        chat.ask("Hello")
        chat.respond("Fine.")
        assert chat.ask("Still there?") == "Fine."
        chat.find("#new").click()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_formulas_are_accessible(open_chat: Callable[..., ChatPage], scheme: str, width: int) -> None:
    chat = open_chat(color_scheme=scheme, viewport={"width": width, "height": 844})
    show(chat, FORMULAS + "\n\\[" + " + ".join(f"x_{{{n}}}" for n in range(60)) + "\\]\n")
    expect(chat.answer().locator(".katex")).to_have_count(12)
    assert_accessible(chat, "formulas")
    chat.expect_width(width)
    chat.screenshot(f"{scheme}-{width}-math")
