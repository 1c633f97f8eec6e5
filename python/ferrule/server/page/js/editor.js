// A message while it is edited: in its place, with the words on it.

import { el, growing, hasCoarsePointer } from "./dom.js";
import { button } from "./icons.js";

/** The form; `save(text)` or `cancel()` is called once. */
export function editor({ text, label, action, save, cancel }) {
  const area = growing(el("textarea", { "aria-label": label, rows: "3", keydown }));
  area.value = text;
  const form = el(
    "form",
    { class: "editor", submit },
    area,
    el(
      "div",
      { class: "actions" },
      el("button", { type: "submit", class: "primary" }, action),
      button("close", "Cancel", cancel, { class: "plain-button" }),
    ),
  );
  return { form, focus: () => area.focus() };

  function submit(event) {
    event.preventDefault();
    if (area.value.trim() !== "") save(area.value);
  }

  function keydown(event) {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !hasCoarsePointer()) {
      submit(event);
    }
  }
}
