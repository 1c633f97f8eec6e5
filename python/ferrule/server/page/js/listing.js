// The conversations kept in this browser. The one that is shown has its buttons below its title.

import { byId, el } from "./dom.js";
import { button } from "./icons.js";

// So many are found by looking.
const FEW = 8;

/**
 * The list: `{show(entries, currentId)}`.
 *
 * `act` has `open(id)`, and for the one that is shown `rename(id, title)`, `exportOne()` and `remove(id, title)`.
 */
export function listing(act) {
  const list = byId("conversations");
  const filter = byId("filter");
  let entries = [];
  let current = null;
  let renaming = false;

  filter.addEventListener("input", render);
  return { show };

  /** Shows entries `{id, title}`. */
  function show(newEntries, currentId) {
    if (currentId !== current) renaming = false;
    entries = newEntries;
    current = currentId;
    filter.hidden = entries.length < FEW;
    render();
  }

  function render() {
    const wanted = filter.value.trim().toLowerCase();
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const shown = entries.filter(({ title }) => title.toLowerCase().includes(wanted));
    if (!renaming || !list.querySelector("input")) list.replaceChildren(...shown.map(item));
    if (focused) list.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  function item({ id, title }) {
    if (id !== current) return el("li", {}, opener(id, title));
    if (renaming) return el("li", { class: "current" }, renamer(id, title));
    // What nothing was said in yet is kept nowhere.
    return el("li", { class: "current" }, opener(id, title), title ? tools(id, title) : null);
  }

  function opener(id, title) {
    const now = id === current ? "true" : null;
    const click = () => act.open(id);
    const attributes = { type: "button", class: "opener", "aria-current": now, "data-key": id, click };
    return el("button", attributes, title || "New conversation");
  }

  function tools(id, title) {
    const quiet = { quiet: true, class: "icon-button" };
    const dangerous = { quiet: true, class: "icon-button dangerous" };
    const rename = () => {
      renaming = true;
      render();
      list.querySelector("input")?.select();
    };
    return el(
      "div",
      { class: "actions", role: "group", "aria-label": "This conversation" },
      button("edit", "Rename", rename, { ...quiet, "data-key": "rename" }),
      button("export", "Export", () => act.exportOne(), { ...quiet, "data-key": "export" }),
      button("remove", "Delete", () => act.remove(id, title), { ...dangerous, "data-key": "remove" }),
    );
  }

  function renamer(id, title) {
    const blur = () => finish(true);
    const input = el("input", { type: "text", "aria-label": "Title", maxlength: "200", keydown, blur });
    input.value = title;
    return input;

    function keydown(event) {
      if (event.key === "Enter") {
        // The button that gets the focus would be pressed by the same key.
        event.preventDefault();
        finish(true);
      }
      if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    }

    function finish(keeps) {
      if (!renaming) return;
      renaming = false;
      const wanted = input.value.trim();
      if (keeps && wanted !== "" && wanted !== title) act.rename(id, wanted);
      list.replaceChildren();
      render();
      list.querySelector("[data-key=rename]")?.focus();
    }
  }
}
