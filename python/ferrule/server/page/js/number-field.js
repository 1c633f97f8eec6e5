// A field of the settings for a number, with a slider where the parameter has one. An empty field has the default value,
// which it shows in gray.

import { el } from "./dom.js";
import { parseNumber } from "./parameters.js";

/**
 * Creates `{element, show(value), showDefault(value)}` for a parameter, where null is no value.
 *
 * `onChange(value)` is called with each valid value that the user enters.
 */
export function createNumberField(parameter, onChange) {
  const { name, label, hint, slider = null, integer = false } = parameter;
  const input = el("input", {
    id: name,
    type: "text",
    inputmode: integer ? "numeric" : "decimal",
    autocomplete: "off",
    "aria-describedby": `${name}-hint ${name}-error`,
  });
  const range = slider && el("input", { type: "range", id: `${name}-slider`, "aria-label": `${label}, slider`, ...slider });
  const error = el("p", { class: "field-error", id: `${name}-error`, role: "status" });
  const element = el(
    "div",
    { class: "field" },
    el("label", { for: name }, label),
    input,
    range,
    el("p", { class: "hint", id: `${name}-hint` }, hint),
    error,
  );
  let defaultValue = null;

  input.addEventListener("input", () => {
    try {
      const value = parseNumber(parameter, input.value);
      showError("");
      moveSlider(value);
      onChange(value);
    } catch (invalid) {
      // An invalid value is not used; the field shows the error.
      showError(invalid.message);
    }
  });
  range?.addEventListener("input", () => {
    show(range.valueAsNumber);
    onChange(range.valueAsNumber);
  });
  showDefault(parameter.defaultValue ?? null);
  return { element, show, showDefault };

  /** Shows a value; null empties the field. */
  function show(value) {
    input.value = value ?? "";
    showError("");
    moveSlider(value);
  }

  /** Shows the default value, unless all models have the same. */
  function showDefault(value) {
    defaultValue = parameter.defaultValue ?? value;
    input.placeholder = defaultValue ?? parameter.unset ?? "default";
    if (input.value === "") moveSlider(null);
  }

  function moveSlider(value) {
    if (!range) return;
    range.value = value ?? defaultValue ?? 0;
    range.classList.toggle("is-default", value === null);
    range.setAttribute("aria-valuetext", value === null ? defaultText() : String(value));
  }

  function defaultText() {
    return defaultValue === null ? "default" : `${defaultValue}, default`;
  }

  function showError(message) {
    input.setCustomValidity(message);
    input.setAttribute("aria-invalid", String(message !== ""));
    error.textContent = message;
  }
}
