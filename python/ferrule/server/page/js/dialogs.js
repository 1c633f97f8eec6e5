// What the page asks for in between: the key, whether to delete; and the list of keys.

import { setApiKey } from "./api.js";
import { byId } from "./dom.js";

/** Asks for the API key until one is given or the dialog is left; resolves to whether there is one. */
export function askForKey(message) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-message").textContent = message;
  input.value = "";
  return answered(dialog).then((answer) => {
    const given = answer === "use" && input.value.trim() !== "";
    if (given) setApiKey(input.value.trim());
    input.value = "";
    return given;
  });
}

/** Asks whether a conversation is to be deleted. */
export function askToDelete(title) {
  byId("delete-title").textContent = title || "New conversation";
  return answered(byId("delete-dialog")).then((answer) => answer === "delete");
}

/** Shows the list of keys. */
export function showKeys() {
  answered(byId("keys-dialog"));
}

// The forms have method="dialog": the button that is pressed is the answer, and Escape is none.
function answered(dialog) {
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}
