// The tokens of an answer one by one, as the model wrote them: a view for the keyboard and for those who want to see
// every space. The arrow keys walk, Enter goes to the alternatives, Escape comes back.

import { description, enterAlternatives, hideAlternatives, showAlternatives } from "./alternatives.js";
import { el } from "./dom.js";
import { probability, visible } from "./tokens.js";

const LABEL = "Tokens of the answer; arrow keys walk, Enter goes to what else they could be";
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

/** The view; `branching(index)` is what is called with another token that is chosen, or null. */
export function tokenWalk(tokens, branching) {
  const elements = tokens.flatMap((token, index) => (token.text === "" ? [] : [tokenElement(token, index)]));
  const walk = el(
    "div",
    { class: "token-walk", role: "group", "aria-label": LABEL, keydown },
    ...elements,
  );
  elements[0]?.setAttribute("tabindex", "0");
  return walk;

  function tokenElement(token, index) {
    const focus = () => {
      for (const element of elements) element.setAttribute("tabindex", element === made ? "0" : "-1");
      showAlternatives(made, token, branching(index));
    };
    const made = el(
      "span",
      { class: "token walked", role: "button", tabindex: "-1", "aria-label": description(token), focus },
      visible(token.text),
      token.text.endsWith("\n") ? "\n" : null,
    );
    made.style.setProperty("--share", probability(token.logprob));
    return made;
  }

  function keydown(event) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      enterAlternatives();
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
