// The notices above the messages, for errors of the page itself. A notice replaces the one of its topic, and stays until
// it is closed or the problem is solved.

import { byId, el } from "./dom.js";
import { button } from "./icons.js";

/**
 * Shows a notice, with a button "Try again" if `retry` is given.
 *
 * The topic is "conversations" or "presets" for errors of saving them, "server" for the connection and the models, and
 * "files" for files of the user.
 */
export function showNotice(topic, message, retry = null) {
  const shown = find(topic);
  // An unchanged notice is not announced again.
  if (shown?.querySelector("p").textContent === message) return;
  const close = () => clearNotice(topic);
  const again = () => {
    close();
    retry();
  };
  const notice = el(
    "div",
    { class: "notice", "data-topic": topic },
    el("p", {}, message),
    retry && button("regenerate", "Try again", again, { class: "plain-button" }),
    button("close", "Close", close, { iconOnly: true, class: "icon-button" }),
  );
  if (shown) shown.replaceWith(notice);
  else byId("notices").append(notice);
}

/** Removes the notice of a topic. */
export function clearNotice(topic) {
  find(topic)?.remove();
}

function find(topic) {
  return byId("notices").querySelector(`[data-topic="${topic}"]`);
}
