// What a screen reader is told. A stream is not read out word by word: that it began, and what was said, is.

import { byId } from "./dom.js";

/** Says something politely: after what is being read. */
export function announce(text) {
  const region = byId("announcements");
  // The same text twice is no change, and no change is not read out.
  region.textContent = region.textContent === text ? `${text}\u00a0` : text;
}
