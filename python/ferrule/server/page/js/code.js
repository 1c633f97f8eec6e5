// Code blocks with their language and a copy button.

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";

/** Creates a code block; `nodes` are the text nodes and token elements of `text`. */
export function codeBlock(text, language, nodes) {
  const name = (language ?? "").split(/\s/, 1)[0];
  const copy = copyButton("Copy code", () => text, { class: "plain-button" });
  const label = name ? `Code, ${name}` : "Code";
  // The block scrolls sideways, so the keyboard must be able to focus it.
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, name || "text"), copy),
    el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, ...nodes)),
  );
}
