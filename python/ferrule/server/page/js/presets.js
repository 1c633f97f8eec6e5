// Presets: named settings, which are a system prompt and sampling parameters. They are saved in this browser.

import { askForPresetName, confirmDeletion } from "./dialogs.js";
import { el } from "./dom.js";
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
  const deleteButton = button("remove", "Delete preset", remove, { iconOnly: true, class: "icon-button dangerous" });
  const saveButton = button("save", "Save as preset", save, { iconOnly: true, class: "icon-button" });
  const element = el(
    "div",
    { class: "field" },
    el("label", { for: "preset" }, "Preset"),
    el("div", { class: "with-buttons" }, picker, saveButton, deleteButton),
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

  async function change(act) {
    try {
      await transact([PRESETS], "readwrite", act);
      channel.postMessage(null);
      clearNotice("presets");
    } catch (error) {
      showNotice("presets", `Cannot save the presets in this browser: ${error.message}`);
    }
    await load();
  }
}

// Settings are equal if they have the same values, in any order.
function key({ system, parameters }) {
  return JSON.stringify([system, Object.entries(parameters).sort(([one], [two]) => (one < two ? -1 : 1))]);
}
