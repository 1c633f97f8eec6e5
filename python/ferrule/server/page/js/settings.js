// The settings of a conversation: system prompt and sampling parameters. The server chooses the values of empty fields.

import { byId, el } from "./dom.js";
import { ALTERNATIVES, PARAMETERS, parseExtraBody, parseNumber } from "./parameters.js";

/** Creates `{show(conversation)}`; `onChange()` is called when a valid value was written to the conversation. */
export function createSettings(onChange) {
  let conversation = null;
  const system = el("textarea", { id: "system", rows: "4", placeholder: "You are …" });
  const stop = el("textarea", { id: "stop", rows: "2", placeholder: "none", "aria-describedby": "stop-hint" });
  const extraBody = el("textarea", {
    id: "extra_body",
    rows: "3",
    class: "code-field",
    spellcheck: "false",
    placeholder: '{"ignore_eos": true}',
    "aria-describedby": "extra_body-hint extra_body-error",
  });
  const numbers = new Map([...PARAMETERS, ALTERNATIVES].map((parameter) => [parameter, numberField(parameter)]));

  const form = byId("settings-form");
  form.append(
    field(system, "System prompt", null),
    el("div", { class: "grid" }, ...PARAMETERS.map((each) => field(numbers.get(each), each.label, each.hint))),
    field(stop, "Stop sequences", "One per line"),
    field(numbers.get(ALTERNATIVES), ALTERNATIVES.label, ALTERNATIVES.hint),
    field(extraBody, "Extra body", "Other fields of the request, as a JSON object"),
    el("button", { type: "button", class: "plain-button", click: reset }, "Reset to defaults"),
  );
  form.addEventListener("submit", (event) => event.preventDefault());

  system.addEventListener("input", () => change(() => (conversation.system = system.value)));
  stop.addEventListener("input", () => {
    change(() => setParameter("stop", stop.value.split("\n").filter((line) => line !== "")));
  });
  extraBody.addEventListener("input", () => {
    changeIfValid(extraBody, () => setParameter("extra_body", parseExtraBody(extraBody.value)));
  });
  for (const [parameter, input] of numbers) {
    input.addEventListener("input", () => {
      changeIfValid(input, () => setParameter(parameter.name, parseNumber(parameter, input.value)));
    });
  }
  return { show };

  /** Shows the settings of a conversation. */
  function show(shown) {
    conversation = shown;
    const { parameters } = shown;
    system.value = shown.system;
    stop.value = (parameters.stop ?? []).join("\n");
    extraBody.value = parameters.extra_body ? JSON.stringify(parameters.extra_body) : "";
    for (const [{ name }, input] of numbers) input.value = parameters[name] ?? "";
    for (const input of [extraBody, ...numbers.values()]) showError(input, "");
  }

  function reset() {
    change(() => (conversation.parameters = {}));
    show(conversation);
  }

  function setParameter(name, value) {
    if (value === null || value.length === 0) delete conversation.parameters[name];
    else conversation.parameters[name] = value;
  }

  function change(apply) {
    apply();
    onChange();
  }

  // An invalid value is not written to the conversation; its field shows the error.
  function changeIfValid(input, apply) {
    try {
      change(apply);
      showError(input, "");
    } catch (error) {
      showError(input, error.message);
    }
  }

  function showError(input, message) {
    input.setCustomValidity(message);
    input.setAttribute("aria-invalid", String(message !== ""));
    byId(`${input.id}-error`).textContent = message;
  }
}

function numberField({ name, defaultValue = null, integer = false }) {
  return el("input", {
    id: name,
    type: "text",
    inputmode: integer ? "numeric" : "decimal",
    autocomplete: "off",
    placeholder: defaultValue ?? "default",
    "aria-describedby": `${name}-hint ${name}-error`,
  });
}

function field(input, label, hint) {
  return el(
    "div",
    { class: "field" },
    el("label", { for: input.id }, label),
    input,
    hint && el("p", { class: "hint", id: `${input.id}-hint` }, hint),
    el("p", { class: "field-error", id: `${input.id}-error`, role: "status" }),
  );
}
