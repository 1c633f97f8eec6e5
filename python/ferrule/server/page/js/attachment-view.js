// Attachments as chips: in the composer with a button that removes each, in messages with the text to unfold.

import { attachmentSize, readAttachment } from "./attachments.js";
import { byId, el } from "./dom.js";
import { button, icon } from "./icons.js";
import { clearNotice, showNotice } from "./notice.js";

const MAX_SHOWN_CHARACTERS = 100_000;

/** Creates the chips of a message. */
export function attachmentChips(attachments) {
  return el("div", { class: "attachments" }, ...attachments.map(messageChip));
}

function messageChip(attachment) {
  const details = el("details", { class: "attachment", toggle }, el("summary", {}, ...label(attachment)));
  return details;

  // A long text is shown only when it is needed.
  function toggle() {
    if (!details.open || details.querySelector("pre")) return;
    const { name, text } = attachment;
    const shown = text.length > MAX_SHOWN_CHARACTERS ? `${text.slice(0, MAX_SHOWN_CHARACTERS)}…` : text;
    details.append(el("pre", { tabindex: "0", "aria-label": name }, shown));
  }
}

function label(attachment) {
  return [
    icon("document"),
    el("span", { class: "attachment-name" }, attachment.name),
    el("span", { class: "attachment-size" }, attachmentSize(attachment)),
  ];
}

/**
 * Creates the attachments of the composer: `{all(), isReading(), clear()}`. Files come from the button, by dropping them
 * on the page, and from the clipboard. `onChange()` is called after a change.
 */
export function createAttachmentField(onChange) {
  const list = byId("attachments");
  const input = byId("attach-file");
  let attachments = [];
  let reading = 0;

  byId("attach").append(icon("attach"));
  byId("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await add(input.files);
    // Without this, selecting the same file again would not be a change.
    input.value = "";
  });
  byId("prompt").addEventListener("paste", (event) => {
    // Spreadsheets and word processors copy a picture beside the text.
    if (!event.clipboardData.types.includes("text/plain")) addFrom(event, event.clipboardData);
  });
  byId("main").addEventListener("dragover", (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  byId("main").addEventListener("drop", (event) => addFrom(event, event.dataTransfer));
  show();
  return { all: () => attachments, isReading: () => reading > 0, clear };

  function addFrom(event, { files }) {
    if (files.length === 0) return;
    event.preventDefault();
    add(files);
  }

  async function add(files) {
    clearNotice("files");
    reading += 1;
    show();
    for (const file of [...files]) {
      try {
        attachments = [...attachments, await readAttachment(file)];
      } catch (error) {
        showNotice("files", error.message);
      }
      show();
    }
    reading -= 1;
    show();
  }

  function clear() {
    attachments = [];
    show();
  }

  function remove(attachment) {
    attachments = attachments.filter((each) => each !== attachment);
    show();
    byId("prompt").focus();
  }

  function show() {
    list.hidden = attachments.length === 0 && reading === 0;
    const busy = reading > 0 ? [el("li", { class: "attachment-chip" }, "Reading…")] : [];
    list.replaceChildren(...attachments.map(chip), ...busy);
    onChange();
  }

  function chip(attachment) {
    const iconOnly = { iconOnly: true, class: "icon-button" };
    const removeButton = button("close", `Remove ${attachment.name}`, () => remove(attachment), iconOnly);
    return el("li", { class: "attachment-chip" }, ...label(attachment), removeButton);
  }
}
