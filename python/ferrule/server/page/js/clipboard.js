// Copy buttons. Browsers provide `navigator.clipboard` on https and localhost only; elsewhere the page uses the
// deprecated `document.execCommand`.

import { announce } from "./announce.js";
import { el } from "./dom.js";
import { button, icon } from "./icons.js";

const CHECK_MARK_MILLISECONDS = 1500;

/** Creates a button that copies the result of `text()`. */
export function copyButton(label, text, attributes) {
  const made = button("copy", label, async () => {
    await copy(text());
    const copyIcon = made.querySelector(".icon");
    const checkIcon = icon("check");
    copyIcon.replaceWith(checkIcon);
    announce("Copied");
    setTimeout(() => checkIcon.replaceWith(copyIcon), CHECK_MARK_MILLISECONDS);
  }, attributes);
  return made;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const area = el("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}
