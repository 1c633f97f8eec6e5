// Which models the server has, and which one is asked.

import { listModels } from "./api.js";
import { askForKey } from "./dialogs.js";
import { byId, el } from "./dom.js";

const UNAUTHORIZED = 401;

/** The picker: `{load(), all(), choose(id), chosen()}`; `changed()` is called when the user picks one. */
export function modelPicker(changed) {
  const select = byId("model");
  let models = [];
  select.addEventListener("change", changed);
  return { load, all: () => models, choose, chosen: () => select.value || null };

  /** Asks the server, and for the key where the server wants one; throws a ServerError. */
  async function load() {
    for (;;) {
      try {
        models = await listModels();
        break;
      } catch (error) {
        if (error.status !== UNAUTHORIZED || !(await askForKey(error.message))) throw error;
      }
    }
    const chosen = select.value;
    select.replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
    choose(chosen);
    select.disabled = models.length < 2;
  }

  /** Picks the model where the server has it, the first one otherwise. */
  function choose(id) {
    const known = models.some((model) => model.id === id);
    select.value = known ? id : (models[0]?.id ?? "");
  }
}
