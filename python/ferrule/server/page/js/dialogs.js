// Dialogs: the API key, the confirmation of a deletion, and the list of keyboard shortcuts.

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

/** Asks whether to delete a conversation; resolves to the answer. */
export async function confirmDeletion(title) {
  byId("delete-title").textContent = title || "New chat";
  return (await openDialog(byId("delete-dialog"))) === "delete";
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
