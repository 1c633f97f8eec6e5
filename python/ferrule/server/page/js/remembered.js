// Small things that the browser remembers: for this tab, or for good. A browser may be told to keep nothing; then the
// page forgets, and works.

const AREAS = { tab: () => sessionStorage, browser: () => localStorage };

/** The text kept under a key, or null. */
export function recall(area, key) {
  try {
    return AREAS[area]().getItem(key);
  } catch {
    return null;
  }
}

/** Keeps a text under a key; null forgets it. */
export function remember(area, key, text) {
  try {
    if (text === null) AREAS[area]().removeItem(key);
    else AREAS[area]().setItem(key, text);
  } catch {
    // Kept nowhere.
  }
}
