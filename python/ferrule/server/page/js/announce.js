// Announcements for screen readers: the start of an answer and the complete answer, not each token of a stream.

import { byId } from "./dom.js";

/** Announces a text after the screen reader has finished what it is reading. */
export function announce(text) {
  const region = byId("announcements");
  // Screen readers announce changes only, so a repeated text needs a different character.
  region.textContent = region.textContent === text ? `${text}\u00a0` : text;
}
