// The form that edits a message in its place.

import { autoGrow, el, hasTouchScreen } from "./dom.js";
import { button } from "./icons.js";

/** Creates `{form, focus()}`; either `save(text)` or `cancel()` is called, once. */
export function createEditor({ text, label, saveLabel, save, cancel }) {
  const area = autoGrow(el("textarea", { "aria-label": label, rows: "3", keydown }));
  area.value = text;
  const form = el(
    "form",
    { class: "editor", submit },
    area,
    el(
      "div",
      { class: "actions" },
      el("button", { type: "submit", class: "primary" }, saveLabel),
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
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !hasTouchScreen()) {
      submit(event);
    }
  }
}
