// The notice above the messages, for errors of the page itself: no connection, an invalid file, no storage.

import { byId, el } from "./dom.js";
import { button } from "./icons.js";

/** Shows a notice, with a button "Try again" if `retry` is given. */
export function showNotice(message, retry = null) {
  const notice = byId("notice");
  const retryButton = retry && button("regenerate", "Try again", () => {
    clearNotice();
    retry();
  }, { class: "plain-button" });
  const closeButton = button("close", "Close", clearNotice, { iconOnly: true, class: "icon-button" });
  notice.replaceChildren(el("p", {}, message), ...(retryButton ? [retryButton] : []), closeButton);
  notice.hidden = false;
}

/** Removes the notice. */
export function clearNotice() {
  byId("notice").hidden = true;
  byId("notice").replaceChildren();
}
