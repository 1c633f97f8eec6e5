// A block of code, with its language and a button that copies it.

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";

/** The block; `nodes` are its text, cut where tokens end. */
export function codeBlock(text, language, nodes) {
  const name = (language ?? "").split(/\s/, 1)[0];
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, name || "text"), copyButton("Copy code", () => text, { class: "plain-button" })),
    el("pre", { tabindex: "0", role: "region", "aria-label": name ? `Code, ${name}` : "Code" }, el("code", {}, ...nodes)),
  );
}
