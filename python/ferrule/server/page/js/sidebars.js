// The two sidebars: conversations and settings. On wide screens they are beside the messages. On narrow screens they
// cover the messages, one at a time, and the messages are inert.

import { byId } from "./dom.js";

const NARROW = matchMedia("(max-width: 60rem)");
const IDS = ["sidebar", "settings"];

/** Connects the buttons of the sidebars; returns `{toggle(id), closeOverlays()}`. */
export function createSidebars() {
  for (const id of IDS) {
    openButton(id).addEventListener("click", () => toggle(id));
    byId(`close-${id}`).addEventListener("click", () => setOpen(id, false));
  }
  byId("backdrop").addEventListener("click", closeOverlays);
  NARROW.addEventListener("change", reset);
  reset();
  return { toggle, closeOverlays };

  function reset() {
    setOpen("sidebar", !NARROW.matches, false);
    setOpen("settings", false, false);
  }

  function toggle(id) {
    setOpen(id, byId(id).hidden);
  }

  /** Closes the sidebars that cover the messages; returns whether there were any. */
  function closeOverlays() {
    const open = NARROW.matches ? IDS.filter((id) => !byId(id).hidden) : [];
    for (const id of open) setOpen(id, false);
    return open.length > 0;
  }

  function setOpen(id, isOpen, movesFocus = true) {
    const sidebar = byId(id);
    const hadFocus = sidebar.contains(document.activeElement);
    if (isOpen && NARROW.matches) for (const other of IDS) if (other !== id) setOpen(other, false, false);
    sidebar.hidden = !isOpen;
    openButton(id).setAttribute("aria-expanded", String(isOpen));
    const isCovered = NARROW.matches && IDS.some((name) => !byId(name).hidden);
    byId("backdrop").hidden = !isCovered;
    byId("main").inert = isCovered;
    if (!movesFocus) return;
    if (isOpen) byId(`close-${id}`).focus();
    else if (hadFocus || NARROW.matches) openButton(id).focus();
  }
}

function openButton(id) {
  return byId(`open-${id}`);
}
