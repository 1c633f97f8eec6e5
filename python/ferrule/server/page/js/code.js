// Code blocks with their language and a copy button.

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import { colorNodes, highlight } from "./highlight.js";

const CLOSED = /^ {0,3}(`{3,}|~{3,})[^]*\n {0,3}\1[`~]*[ \t]*\n*$/;

/** Creates a code block of a Markdown token; `nodes` are the text nodes and token elements of its text. */
export function codeBlock({ text, lang, raw }, nodes) {
  const name = (lang ?? "").split(/\s/, 1)[0];
  // A block that is not complete stays plain, because its colors would change with each token.
  const colored = name && CLOSED.test(raw) ? colorNodes(nodes, highlight(text, name)) : nodes;
  const copy = copyButton("Copy code", () => text, { class: "plain-button" });
  const label = name ? `Code, ${name}` : "Code";
  // The block scrolls sideways, so the keyboard must be able to focus it.
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, name || "text"), copy),
    el("pre", { tabindex: "0", role: "group", "aria-label": label }, el("code", {}, ...colored)),
  );
}
