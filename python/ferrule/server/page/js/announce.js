// Announcements for screen readers. A stream is not read word by word: its start and the finished answer are.

import { byId } from "./dom.js";

/** Says something politely: after what is being read. */
export function announce(text) {
  const region = byId("announcements");
  // The same text twice is no change, and no change is not read out.
  region.textContent = region.textContent === text ? `${text}\u00a0` : text;
}
