// Tokens colored by their probability: the legend of the colors.

import { el } from "./dom.js";
import { CERTAINTY_LABELS } from "./tokens.js";

/** Creates the legend, which is visible within an element of the class "certainty". */
export function certaintyLegend() {
  const entries = CERTAINTY_LABELS.map((label, level) => el("span", { "data-certainty": level }, label));
  return el("p", { class: "certainty-legend" }, "Probability of a token:", ...entries);
}
