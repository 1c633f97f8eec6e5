// The system prompt and the sampling parameters of a conversation. What is empty is left to the server.

import { byId, el } from "./dom.js";
import { ALTERNATIVES, PARAMETERS, readFurther, readNumber } from "./parameters.js";

/** The panel: `{show(conversation)}`; `changed()` is called when a value was taken over into the conversation. */
export function panel(changed) {
  let conversation = null;
  const system = el("textarea", { id: "system", rows: "4", placeholder: "You are …" });
  const stop = el("textarea", { id: "stop", rows: "2", placeholder: "none", "aria-describedby": "stop-hint" });
  const further = el("textarea", {
    id: "further",
    rows: "3",
    class: "code-field",
    spellcheck: "false",
    placeholder: '{"ignore_eos": true}',
    "aria-describedby": "further-hint further-fault",
  });
  const numbers = new Map([...PARAMETERS, ALTERNATIVES].map((parameter) => [parameter, numberField(parameter)]));

  const form = byId("settings-form");
  form.append(
    field(system, "System prompt", null),
    el("div", { class: "grid" }, ...PARAMETERS.map((one) => field(numbers.get(one), one.label, one.hint))),
    field(stop, "Stop strings", "one on each line"),
    field(numbers.get(ALTERNATIVES), ALTERNATIVES.label, "how many likely tokens to keep for each one of the answer"),
    field(further, "Further fields", "of the request, as JSON"),
    el("button", { type: "button", class: "plain-button", click: reset }, "Back to the server's defaults"),
  );
  form.addEventListener("submit", (event) => event.preventDefault());

  system.addEventListener("input", () => take(() => (conversation.system = system.value)));
  stop.addEventListener("input", () => take(() => set("stop", stop.value.split("\n").filter((line) => line !== ""))));
  further.addEventListener("input", () => read(further, () => set("further", readFurther(further.value))));
  for (const [parameter, input] of numbers) {
    input.addEventListener("input", () => read(input, () => set(parameter.name, readNumber(parameter, input.value))));
  }
  return { show };

  /** Shows what is set for a conversation. */
  function show(shown) {
    conversation = shown;
    const { parameters } = shown;
    system.value = shown.system;
    stop.value = (parameters.stop ?? []).join("\n");
    further.value = parameters.further ? JSON.stringify(parameters.further) : "";
    for (const [{ name }, input] of numbers) input.value = parameters[name] ?? "";
    for (const input of [further, ...numbers.values()]) complain(input, "");
  }

  function reset() {
    take(() => (conversation.parameters = {}));
    show(conversation);
  }

  function set(name, value) {
    if (value === null || value.length === 0) delete conversation.parameters[name];
    else conversation.parameters[name] = value;
  }

  function take(act) {
    act();
    changed();
  }

  // What cannot be read is not taken over, and its field says why.
  function read(input, act) {
    try {
      take(act);
      complain(input, "");
    } catch (error) {
      complain(input, error.message);
    }
  }

  function complain(input, message) {
    input.setCustomValidity(message);
    input.setAttribute("aria-invalid", String(message !== ""));
    byId(`${input.id}-fault`).textContent = message;
  }
}

function numberField({ name, usual = null, integer = false }) {
  return el("input", {
    id: name,
    type: "text",
    inputmode: integer ? "numeric" : "decimal",
    autocomplete: "off",
    placeholder: usual ?? "default",
    "aria-describedby": `${name}-hint ${name}-fault`,
  });
}

function field(input, label, hint) {
  return el(
    "div",
    { class: "field" },
    el("label", { for: input.id }, label),
    input,
    hint && el("p", { class: "hint", id: `${input.id}-hint` }, hint),
    el("p", { class: "fault", id: `${input.id}-fault`, role: "status" }),
  );
}
