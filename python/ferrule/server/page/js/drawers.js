// The two sides of the page: the conversations and the settings. On a wide screen they stand beside the messages; on a
// narrow one they lie above them, one at a time, and what is below them cannot be reached.

import { byId } from "./dom.js";

const NARROW = matchMedia("(max-width: 60rem)");
const SIDES = ["sidebar", "settings"];

/** Makes the buttons open and close the sides: `{toggle(id), closeAll()}`; `closeAll` closes what lies above. */
export function drawers() {
  for (const id of SIDES) {
    opener(id).addEventListener("click", () => toggle(id));
    byId(`close-${id}`).addEventListener("click", () => set(id, false));
  }
  byId("veil").addEventListener("click", closeAll);
  NARROW.addEventListener("change", settle);
  settle();
  return { toggle, closeAll };

  function settle() {
    set("sidebar", !NARROW.matches, false);
    set("settings", false, false);
  }

  function toggle(id) {
    set(id, byId(id).hidden);
  }

  /** Closes what lies above the messages, and says whether something did. */
  function closeAll() {
    const open = NARROW.matches ? SIDES.filter((id) => !byId(id).hidden) : [];
    for (const id of open) set(id, false);
    return open.length > 0;
  }

  function set(id, opens, movesFocus = true) {
    const side = byId(id);
    const hadFocus = side.contains(document.activeElement);
    if (opens && NARROW.matches) for (const other of SIDES) if (other !== id) set(other, false, false);
    side.hidden = !opens;
    opener(id).setAttribute("aria-expanded", String(opens));
    const covered = NARROW.matches && SIDES.some((name) => !byId(name).hidden);
    byId("veil").hidden = !covered;
    byId("main").inert = covered;
    if (!movesFocus) return;
    if (opens) byId(`close-${id}`).focus();
    else if (hadFocus || NARROW.matches) opener(id).focus();
  }
}

function opener(id) {
  return byId(`open-${id}`);
}
