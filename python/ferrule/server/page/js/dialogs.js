// Dialogs: the API key, the confirmation of a deletion, the name of a preset, a large field, and the keyboard shortcuts.

import { setApiKey } from "./api.js";
import { byId } from "./dom.js";

/** Asks for the API key; resolves to whether the user entered one. */
export async function askForApiKey(message) {
  const input = byId("api-key");
  byId("api-key-message").textContent = message;
  input.value = "";
  const answer = await openDialog(byId("api-key-dialog"));
  const key = input.value.trim();
  input.value = "";
  if (answer !== "use" || key === "") return false;
  setApiKey(key);
  return true;
}

/** Asks whether to delete a conversation or a preset; resolves to the answer. */
export async function confirmDeletion(noun, title) {
  byId("delete-question").textContent = `Delete this ${noun}?`;
  byId("delete-title").textContent = title || "New chat";
  return (await openDialog(byId("delete-dialog"))) === "delete";
}

/** Asks for the name of a preset; `names` are those in use. Resolves to null if the user entered none. */
export async function askForPresetName(name, names) {
  const input = byId("preset-name");
  const showReplaced = () => (byId("preset-replaced").hidden = !names.includes(input.value.trim()));
  input.value = name;
  input.oninput = showReplaced;
  showReplaced();
  const answer = await openDialog(byId("preset-dialog"));
  return answer === "save" ? input.value.trim() || null : null;
}

/** Edits the text of a field in a large dialog; the field gets each change. */
export function enlarge(area, label) {
  const large = byId("large-text");
  byId("large-title").textContent = label;
  large.placeholder = area.placeholder;
  large.value = area.value;
  large.oninput = () => {
    area.value = large.value;
    area.dispatchEvent(new Event("input"));
  };
  openDialog(byId("large-dialog"));
}

/** Shows the list of keyboard shortcuts. */
export function showShortcuts() {
  openDialog(byId("shortcuts-dialog"));
}

// The forms have method="dialog", so that the value of the pressed button is the return value; Escape returns "".
function openDialog(dialog) {
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}
