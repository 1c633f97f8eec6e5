// The settings of a conversation: system prompt and sampling parameters. Empty fields have the defaults of the model.

import { enlarge } from "./dialogs.js";
import { byId, el } from "./dom.js";
import { button } from "./icons.js";
import { createNumberField } from "./number-field.js";
import { ALTERNATIVES, PARAMETERS, parseExtraBody } from "./parameters.js";
import { createPresets } from "./presets.js";
import { samplingFields } from "./request.js";

/**
 * Creates `{show(conversation), showDefaults(defaults)}`.
 *
 * `onChange()` is called when a valid value was written to the conversation.
 */
export function createSettings(onChange) {
  let conversation = null;
  let defaults = null;
  const system = el("textarea", { id: "system", rows: "8", placeholder: "You are …" });
  const stop = el("textarea", { id: "stop", rows: "2", placeholder: "none", "aria-describedby": "stop-hint" });
  const extraBody = el("textarea", {
    id: "extra_body",
    rows: "3",
    class: "code-field",
    spellcheck: "false",
    placeholder: '{"ignore_eos": true}',
    "aria-describedby": "extra_body-hint extra_body-error",
  });
  const numbers = new Map([...PARAMETERS, ALTERNATIVES].map((parameter) => [parameter.name, numberField(parameter)]));
  const presets = createPresets({ current: () => conversation, apply: applyPreset });
  const sent = el("pre", { id: "sent", tabindex: "0", "aria-label": "Fields of the request" });

  byId("settings-form").append(
    presets.element,
    systemField(system),
    el("div", { class: "grid" }, ...PARAMETERS.map(({ name }) => numbers.get(name).element)),
    field(stop, "Stop sequences", "One per line"),
    numbers.get(ALTERNATIVES.name).element,
    field(extraBody, "Extra body", "Other fields of the request, as a JSON object"),
    el("details", { class: "sent" }, el("summary", {}, "What is sent"), sent),
    el("button", { type: "button", class: "plain-button", click: reset }, "Reset to defaults"),
  );
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());

  system.addEventListener("input", () => change(() => (conversation.system = system.value)));
  stop.addEventListener("input", () => {
    change(() => setParameter("stop", stop.value.split("\n").filter((line) => line !== "")));
  });
  extraBody.addEventListener("input", () => {
    try {
      const value = parseExtraBody(extraBody.value);
      showExtraBodyError("");
      change(() => setParameter("extra_body", value));
    } catch (error) {
      // An invalid value is not written to the conversation.
      showExtraBodyError(error.message);
    }
  });
  return { show, showDefaults };

  /** Shows the settings of a conversation. */
  function show(shown) {
    conversation = shown;
    const { parameters } = shown;
    system.value = shown.system;
    stop.value = (parameters.stop ?? []).join("\n");
    extraBody.value = parameters.extra_body ? JSON.stringify(parameters.extra_body) : "";
    showExtraBodyError("");
    for (const [name, number] of numbers) number.show(parameters[name] ?? null);
    presets.show();
    showSent();
  }

  /** Shows the defaults of the selected model, an object by name; null if they are unknown. */
  function showDefaults(values) {
    defaults = values;
    for (const [name, number] of numbers) number.showDefault(defaults?.[name] ?? null);
    showSent();
  }

  function showSent() {
    if (conversation) sent.textContent = JSON.stringify(samplingFields(conversation.parameters, defaults), null, 1);
  }

  function numberField(parameter) {
    return createNumberField(parameter, (value) => change(() => setParameter(parameter.name, value)));
  }

  function reset() {
    applyPreset({ system: conversation.system, parameters: {} });
  }

  function applyPreset({ system, parameters }) {
    change(() => Object.assign(conversation, { system, parameters }));
    show(conversation);
  }

  function setParameter(name, value) {
    if (value === null || value.length === 0) delete conversation.parameters[name];
    else conversation.parameters[name] = value;
  }

  function change(apply) {
    apply();
    presets.show();
    showSent();
    onChange();
  }

  function showExtraBodyError(message) {
    extraBody.setCustomValidity(message);
    extraBody.setAttribute("aria-invalid", String(message !== ""));
    byId("extra_body-error").textContent = message;
  }
}

function systemField(system) {
  const label = "System prompt";
  const large = button("enlarge", "Enlarge", () => enlarge(system, label), { iconOnly: true, class: "icon-button" });
  return el(
    "div",
    { class: "field" },
    el("div", { class: "with-buttons" }, el("label", { for: system.id }, label), large),
    system,
  );
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
