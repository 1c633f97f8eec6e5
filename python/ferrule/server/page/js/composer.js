// The message field and its attachments. Enter sends the message and Shift+Enter starts a new line; on touch screens Enter starts a new
// line.

import { createAttachmentField } from "./attachment-view.js";
import { autoGrow, byId, hasTouchScreen } from "./dom.js";
import { icon } from "./icons.js";

/**
 * Creates `{setRunning(running), focus(), setText(text)}`; `send(text, attachments)` returns whether the message was
 * accepted.
 */
export function createComposer({ send, stop }) {
  const form = byId("composer");
  const area = autoGrow(byId("prompt"));
  const button = byId("send");
  const attachments = createAttachmentField(() => focus());
  let running = false;

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || hasTouchScreen()) return;
    event.preventDefault();
    if (!running) submit();
  });
  setRunning(false);
  return { setRunning, focus, setText };

  function submit() {
    if (running) return stop();
    const isEmpty = area.value.trim() === "" && attachments.all().length === 0;
    if (isEmpty || attachments.isReading() || !send(area.value, attachments.all())) return;
    setValue("");
    attachments.clear();
  }

  // On touch screens the focus would open the keyboard, which covers the messages.
  function focus() {
    if (!hasTouchScreen()) area.focus();
  }

  function setRunning(value) {
    running = value;
    button.replaceChildren(icon(running ? "stop" : "send"));
    button.setAttribute("aria-label", running ? "Stop" : "Send");
    button.title = running ? "Stop (Esc)" : "Send (Enter)";
    button.classList.toggle("stop", running);
  }

  function setText(text) {
    setValue(text);
    area.focus();
  }

  function setValue(text) {
    area.value = text;
    area.dispatchEvent(new Event("input"));
  }
}
