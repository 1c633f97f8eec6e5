// A block of code, with its language and a button that copies it.

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";

/** The block; `nodes` are its text, cut where tokens end. */
export function codeBlock(text, language, nodes) {
  const name = (language ?? "").split(/\s/, 1)[0];
  const copy = copyButton("Copy code", () => text, { class: "plain-button" });
  // It scrolls sideways, so that the keyboard has to reach it.
  const label = name ? `Code, ${name}` : "Code";
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, name || "text"), copy),
    el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, ...nodes)),
  );
}
