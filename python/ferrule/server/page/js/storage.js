// Small values in the browser's storage: "session" until the tab is closed, "local" permanently. If the browser blocks
// storage, values are not saved and the page still works.

const AREAS = { session: () => sessionStorage, local: () => localStorage };

/** Returns the text of a key, or null. */
export function readStorage(area, key) {
  try {
    return AREAS[area]().getItem(key);
  } catch {
    return null;
  }
}

/** Saves the text of a key. */
export function writeStorage(area, key, text) {
  try {
    AREAS[area]().setItem(key, text);
  } catch {
    // The browser blocks storage.
  }
}
