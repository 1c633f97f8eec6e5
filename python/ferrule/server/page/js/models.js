// The model picker: the models of the server and the selected one.

import { listModels } from "./api.js";
import { askForApiKey } from "./dialogs.js";
import { byId, el } from "./dom.js";

const UNAUTHORIZED = 401;

/**
 * Creates `{load(), all(), find(id), select(id), selected()}`; `onChange()` is called when the user selects a model.
 *
 * A model is the server's description, `{id, max_model_len, answer_defaults, …}`.
 */
export function createModelPicker(onChange) {
  const picker = byId("model");
  let models = [];
  picker.addEventListener("change", onChange);
  const find = (id) => models.find((model) => model.id === id) ?? null;
  return { load, all: () => models, find, select, selected: () => picker.value || null };

  /** Loads the models, and asks for the API key if the server requires one; throws a ServerError. */
  async function load() {
    for (;;) {
      try {
        models = await listModels();
        break;
      } catch (error) {
        if (error.status !== UNAUTHORIZED || !(await askForApiKey(error.message))) throw error;
      }
    }
    const selected = picker.value;
    picker.replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
    select(selected);
    picker.disabled = models.length < 2;
  }

  /** Selects a model, or the first one if the server does not have it. */
  function select(id) {
    picker.value = find(id) ? id : (models[0]?.id ?? "");
  }
}
