// Where a message is written. Enter sends and Shift+Enter is a new line; on glass Enter is a new line.

import { byId, growing, hasCoarsePointer } from "./dom.js";
import { icon } from "./icons.js";

/** The form: `{setRunning(running), focus(), fill(text)}`; `send(text)` says whether the text was taken. */
export function composer({ send, stop }) {
  const form = byId("composer");
  const area = growing(byId("prompt"));
  const button = byId("send");
  let running = false;

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || hasCoarsePointer()) return;
    event.preventDefault();
    if (!running) submit();
  });
  setRunning(false);
  return { setRunning, focus, fill };

  function submit() {
    if (running) return stop();
    if (area.value.trim() !== "" && send(area.value)) write("");
  }

  // On glass the focus would bring the keyboard over what there is to read.
  function focus() {
    if (!hasCoarsePointer()) area.focus();
  }

  function setRunning(value) {
    running = value;
    button.replaceChildren(icon(running ? "stop" : "send"));
    button.setAttribute("aria-label", running ? "Stop" : "Send");
    button.title = running ? "Stop (Esc)" : "Send (Enter)";
    button.classList.toggle("stops", running);
  }

  function fill(text) {
    write(text);
    area.focus();
  }

  function write(text) {
    area.value = text;
    area.dispatchEvent(new Event("input"));
  }
}
