// The buttons that bring conversations out of the browser and back.

import { byId } from "./dom.js";
import { clearNotice, notice } from "./notice.js";
import * as store from "./store.js";
import { download, readFile } from "./transfer.js";

/**
 * Makes the buttons work: `{exportOne()}`, for the conversation that is shown.
 *
 * `current()` is that one, `show(conversation)` shows another, `refresh()` lists what is kept.
 */
export function exchange({ current, show, refresh }) {
  const input = byId("import-file");
  byId("export-all").addEventListener("click", exportAll);
  byId("import").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    const [file] = input.files;
    if (file) await read(file);
    // The same file can be chosen again.
    input.value = "";
  });
  return { exportOne: () => download([current()], current().title) };

  async function exportAll() {
    const all = await store.loadAll();
    if (all.length > 0) download(all, `ferrule ${new Date().toISOString().slice(0, 10)}`);
    else notice("There is no conversation to export yet.");
  }

  async function read(file) {
    try {
      const found = readFile(await file.text());
      await store.save(...found);
      if (found.length > 0) show(found[0]);
      await refresh();
      clearNotice();
    } catch (error) {
      notice(error.message);
    }
  }
}
