// What went wrong with the page itself: no server, a file that cannot be read, no place in the browser.

import { byId, el } from "./dom.js";
import { button } from "./icons.js";

/** Shows a message above the messages, with a way out where there is one. */
export function notice(message, retry = null) {
  const place = byId("notice");
  const again = retry && button("regenerate", "Try again", () => {
    clearNotice();
    retry();
  }, { class: "plain-button" });
  const close = button("close", "Close", clearNotice, { quiet: true, class: "icon-button" });
  place.replaceChildren(el("p", {}, message), ...(again ? [again] : []), close);
  place.hidden = false;
}

/** Takes it away. */
export function clearNotice() {
  byId("notice").hidden = true;
  byId("notice").replaceChildren();
}
