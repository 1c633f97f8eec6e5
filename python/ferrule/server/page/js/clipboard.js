// Copying. The clipboard's own interface exists on https and on this machine alone; elsewhere the old way has to do.

import { button, icon } from "./icons.js";
import { announce } from "./announce.js";
import { el } from "./dom.js";

const SHOWN_MILLISECONDS = 1500;

/** A button that copies what `text()` says. */
export function copyButton(label, text, attributes) {
  const made = button("copy", label, async () => {
    await copy(text());
    const before = made.querySelector(".icon");
    const done = icon("check");
    before.replaceWith(done);
    announce("Copied");
    setTimeout(() => done.replaceWith(before), SHOWN_MILLISECONDS);
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
