// The list of saved conversations: the pinned ones, then the others by date. The current one has buttons below its title.

import * as database from "./database.js";
import { dateGroup } from "./dates.js";
import { byId, el } from "./dom.js";
import { button } from "./icons.js";
import { matches, wordsOf } from "./search.js";

// A shorter list does not need a search field.
const MIN_SEARCHABLE = 2;

/**
 * Creates `{show(entries, currentId), select(id)}`.
 *
 * `handlers` has `open(id)`, and for the current conversation `rename(id, title)`, `pin(isPinned)`, `exportCurrent()`,
 * `shareCurrent()` and `remove(id, title)`.
 */
export function createConversationList(handlers) {
  const list = byId("conversations");
  const filter = byId("filter");
  let entries = [];
  let current = null;
  let excerpts = new Map();
  let isRenaming = false;

  filter.addEventListener("input", search);
  return { show, select };

  /** Makes another conversation the current one, whose actions are visible, until the entries are shown again. */
  function select(id) {
    if (id !== current) show(entries, id);
  }

  /** Shows entries `{id, title, updated, isPinned}`, latest first. */
  function show(newEntries, currentId) {
    if (currentId !== current) isRenaming = false;
    entries = newEntries;
    current = currentId;
    filter.hidden = entries.length < MIN_SEARCHABLE;
    if (filter.hidden) filter.value = "";
    render();
    if (filter.value !== "") search();
  }

  async function search() {
    const query = filter.value;
    // Without a database there are only titles to search.
    const found = await database.search(query).catch(() => new Map());
    if (query !== filter.value) return;
    excerpts = found;
    render();
  }

  function render() {
    const words = wordsOf(filter.value);
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const found = entries.filter(({ id, title }) => matches(title, words) || excerpts.has(id));
    if (!isRenaming || !list.querySelector("input")) list.replaceChildren(...groups(found));
    if (focused) list.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  function groups(found) {
    if (found.length === 0) return [el("p", { class: "date-group" }, "No conversations found")];
    const latestFirst = [...found.filter(({ isPinned }) => isPinned), ...found.filter(({ isPinned }) => !isPinned)];
    const byGroup = Map.groupBy(latestFirst, ({ updated, isPinned }) => (isPinned ? "Pinned" : dateGroup(updated)));
    return [...byGroup].flatMap(([name, members]) => [
      el("p", { class: "date-group" }, name),
      el("ul", { "aria-label": name }, ...members.map(item)),
    ]);
  }

  function item({ id, title, isPinned }) {
    if (id !== current) return el("li", {}, openButton(id, title));
    if (isRenaming) return el("li", { class: "current" }, titleField(id, title));
    // An empty conversation is not saved, so it has no title and no actions.
    return el("li", { class: "current" }, openButton(id, title), title ? actions(id, title, isPinned) : null);
  }

  function openButton(id, title) {
    const isCurrent = id === current ? "true" : null;
    const click = () => handlers.open(id);
    const attributes = { type: "button", class: "open-conversation", "aria-current": isCurrent, "data-key": id, click };
    const excerpt = excerpts.has(id) ? el("span", { class: "excerpt" }, excerpts.get(id)) : null;
    return el("button", attributes, title || "New chat", excerpt);
  }

  function actions(id, title, isPinned) {
    const plain = { iconOnly: true, class: "icon-button" };
    const dangerous = { iconOnly: true, class: "icon-button dangerous" };
    const rename = () => {
      isRenaming = true;
      render();
      list.querySelector("input")?.select();
    };
    return el(
      "div",
      { class: "actions", role: "group", "aria-label": "Actions" },
      button("edit", "Rename", rename, { ...plain, "data-key": "rename" }),
      button("pin", "Pin", () => handlers.pin(!isPinned), { ...plain, "data-key": "pin", "aria-pressed": String(isPinned) }),
      button("export", "Export", () => handlers.exportCurrent(), { ...plain, "data-key": "export" }),
      button("share", "Save as a page to share", () => handlers.shareCurrent(), { ...plain, "data-key": "share" }),
      button("remove", "Delete", () => handlers.remove(id, title), { ...dangerous, "data-key": "remove" }),
    );
  }

  function titleField(id, title) {
    const blur = () => finish(true);
    const input = el("input", { type: "text", "aria-label": "Title", maxlength: "200", keydown, blur });
    input.value = title;
    return input;

    function keydown(event) {
      if (event.key === "Enter") {
        // Without this, the key would also press the button that gets the focus.
        event.preventDefault();
        finish(true);
      }
      if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    }

    function finish(isConfirmed) {
      if (!isRenaming) return;
      isRenaming = false;
      const newTitle = input.value.trim();
      if (isConfirmed && newTitle !== "" && newTitle !== title) handlers.rename(id, newTitle);
      list.replaceChildren();
      render();
      list.querySelector("[data-key=rename]")?.focus();
    }
  }
}
