// Presets: named settings, which are a system prompt and sampling parameters. They are saved in this browser; a file
// moves them to another.

import { announce } from "./announce.js";
import { askForPresetName, confirmDeletion } from "./dialogs.js";
import { el } from "./dom.js";
import { download, MAX_PRESET_NAME, parsePresets } from "./export-format.js";
import { button } from "./icons.js";
import { PRESETS, resultOf, transact } from "./indexed-db.js";
import { clearNotice, showNotice } from "./notice.js";

const NONE = "";

/**
 * Creates `{element, show()}`; `show` updates the picker after a change of the settings.
 *
 * `settings` has `current()`, which returns `{system, parameters}` or null, and `apply({system, parameters})`.
 */
export function createPresets(settings) {
  const picker = el("select", { id: "preset", change: apply });
  const fileInput = el("input", {
    type: "file",
    id: "presets-file",
    accept: "application/json,.json",
    hidden: true,
    "aria-label": "File with presets",
    change: importFile,
  });
  const fileError = el("p", { class: "field-error", id: "presets-error", role: "status" });
  const plain = { iconOnly: true, class: "icon-button" };
  const deleteButton = button("remove", "Delete preset", remove, { iconOnly: true, class: "icon-button dangerous" });
  const saveButton = button("save", "Save as preset", save, plain);
  const exportButton = button("export", "Export presets", exportAll, plain);
  const importButton = button("import", "Import presets", () => fileInput.click(), plain);
  const element = el(
    "div",
    { class: "field" },
    el("label", { for: "preset" }, "Preset"),
    el("div", { class: "with-buttons" }, picker, saveButton, deleteButton, exportButton, importButton),
    fileInput,
    fileError,
  );
  const channel = new BroadcastChannel("ferrule-presets");
  let presets = [];

  channel.addEventListener("message", load);
  load();
  return { element, show };

  async function load() {
    // Without a database there are no presets.
    presets = await transact([PRESETS], "readonly", (store) => resultOf(store.getAll())).catch(() => []);
    show();
  }

  /** Selects the preset that equals the settings. */
  function show() {
    const current = settings.current();
    const selected = current ? presets.find((preset) => key(preset) === key(current)) : null;
    const options = presets.map(({ name }) => el("option", { value: name }, name));
    picker.replaceChildren(el("option", { value: NONE }, "None"), ...options);
    picker.value = selected?.name ?? NONE;
    deleteButton.disabled = !selected;
    exportButton.disabled = presets.length === 0;
  }

  function apply() {
    const { system, parameters } = presets.find(({ name }) => name === picker.value) ?? { system: "", parameters: {} };
    settings.apply({ system, parameters: structuredClone(parameters) });
  }

  async function save() {
    const name = await askForPresetName(picker.value, presets.map((preset) => preset.name));
    if (name === null) return;
    const { system, parameters } = settings.current();
    await change((store) => store.put({ name, system, parameters: structuredClone(parameters) }));
    saveButton.focus();
  }

  async function remove() {
    const name = picker.value;
    if (await confirmDeletion("preset", name)) await change((store) => store.delete(name));
    picker.focus();
  }

  function exportAll() {
    download("presets", presets, "ferrule presets");
  }

  async function importFile() {
    const [file] = fileInput.files;
    if (!file) return;
    fileError.textContent = "";
    try {
      const imported = parsePresets(await file.text());
      const isSaved = await change(async (store) => {
        for (const preset of withFreeNames(imported, await resultOf(store.getAll()))) store.put(preset);
      });
      if (isSaved) announce(`Presets imported: ${imported.length}`);
    } catch (error) {
      fileError.textContent = error.message;
    }
    // Without this, selecting the same file again would not be a change.
    fileInput.value = "";
  }

  // Resolves to whether the change was saved.
  async function change(act) {
    let isSaved = false;
    try {
      await transact([PRESETS], "readwrite", act);
      isSaved = true;
      clearNotice("presets");
      channel.postMessage(null);
    } catch (error) {
      showNotice("presets", `Cannot save the presets in this browser: ${error.message}`);
    }
    await load();
    return isSaved;
  }
}

// Returns the presets without those that exist already. A name that other settings have gets a number.
function withFreeNames(imported, presets) {
  const existing = new Map(presets.map((preset) => [preset.name, preset]));
  const added = [];
  for (const preset of imported) {
    let { name } = preset;
    for (let number = 2; existing.has(name) && key(existing.get(name)) !== key(preset); number++) {
      const suffix = ` (${number})`;
      name = preset.name.slice(0, MAX_PRESET_NAME - suffix.length) + suffix;
    }
    if (existing.has(name)) continue;
    existing.set(name, preset);
    added.push({ ...preset, name });
  }
  return added;
}

// Settings are equal if they have the same values, in any order.
function key({ system, parameters }) {
  return JSON.stringify([system, Object.entries(parameters).sort(([one], [two]) => (one < two ? -1 : 1))]);
}
