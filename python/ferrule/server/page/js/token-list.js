// The tokens of an answer as a list of buttons, which shows whitespace and works with the keyboard: arrow keys select a
// token, Enter moves the focus to its alternatives, and Escape moves it back.

import { focusAlternatives, hideAlternatives, showAlternatives, tokenDescription } from "./alternatives.js";
import { el } from "./dom.js";
import { probability, visibleText } from "./tokens.js";

const LABEL = "Tokens of the answer. Arrow keys move between tokens, Enter moves to the alternatives.";
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

/** Creates the list; `selectHandler(index)` returns the `onSelect` of `showAlternatives` for a token. */
export function createTokenList(tokens, selectHandler) {
  const elements = tokens.flatMap((token, index) => (token.text === "" ? [] : [tokenButton(token, index)]));
  elements[0]?.setAttribute("tabindex", "0");
  return el("div", { class: "token-list", role: "group", "aria-label": LABEL, keydown }, ...elements);

  function tokenButton(token, index) {
    const focus = () => {
      for (const element of elements) element.setAttribute("tabindex", element === button ? "0" : "-1");
      showAlternatives(button, token, selectHandler(index));
    };
    const button = el(
      "span",
      { class: "token token-button", role: "button", tabindex: "-1", "aria-label": tokenDescription(token), focus },
      visibleText(token.text),
      token.text.endsWith("\n") ? "\n" : null,
    );
    button.style.setProperty("--probability", probability(token.logprob));
    return button;
  }

  function keydown(event) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      focusAlternatives();
      return;
    }
    const step = STEPS[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const at = elements.indexOf(document.activeElement);
    hideAlternatives();
    elements[Math.max(0, Math.min(elements.length - 1, at + step))].focus();
  }
}
