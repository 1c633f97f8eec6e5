// The export and import buttons.

import * as database from "./database.js";
import { byId } from "./dom.js";
import { download, downloadText, parseConversations } from "./export-format.js";
import { clearNotice, showNotice } from "./notice.js";
import { sharedPage } from "./share.js";

/**
 * Connects the buttons; returns `{exportCurrent(), shareCurrent()}`, which download the visible conversation as a file
 * to import and as a page to read.
 *
 * `current()` returns the visible conversation, `show(conversation)` shows another, `refresh()` updates the list.
 */
export function createImportExport({ current, show, refresh }) {
  const input = byId("import-file");
  byId("export-all").addEventListener("click", exportAll);
  byId("import").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    const [file] = input.files;
    if (file) await importFile(file);
    // Without this, selecting the same file again would not be a change.
    input.value = "";
  });
  return { exportCurrent: () => download("conversations", [current()], current().title), shareCurrent };

  async function shareCurrent() {
    try {
      downloadText(await sharedPage(current()), current().title, "text/html", "html");
    } catch (error) {
      showNotice("files", `Cannot create the page: ${error.message}`);
    }
  }

  async function exportAll() {
    const all = await database.loadAll();
    if (all.length > 0) download("conversations", all, `ferrule ${new Date().toISOString().slice(0, 10)}`);
    else showNotice("files", "There are no conversations to export.");
  }

  async function importFile(file) {
    clearNotice("files");
    try {
      const conversations = parseConversations(await file.text());
      await database.save(...conversations);
      if (conversations.length > 0) show(conversations[0]);
      await refresh();
    } catch (error) {
      showNotice("files", error.message);
    }
  }
}
