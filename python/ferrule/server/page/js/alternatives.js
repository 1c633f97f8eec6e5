// What else a token could have been: a card beside the token that is pointed at or walked to, with the probabilities
// that the model gave, and the way to go on with another one.

import { el } from "./dom.js";
import { percent, probability, spoken, visible } from "./tokens.js";

// A pointer on its way elsewhere opens nothing, and has a while to reach the card.
const PAUSE_MILLISECONDS = 120;
const LINGER_MILLISECONDS = 300;
const GAP = 6;

const LABEL = "Alternatives of the token";

const card = el("div", { class: "alternatives", role: "dialog", "aria-label": LABEL, hidden: true });
let anchor = null;
let coming = null;
let leaving = null;

card.addEventListener("pointerenter", () => {
  clearTimeout(coming);
  clearTimeout(leaving);
});
card.addEventListener("pointerleave", hideSoon);
card.addEventListener("keydown", keydown);
document.addEventListener("scroll", ({ target }) => card.contains(target) || hideAlternatives(), { capture: true });
// Another token that is pressed brings its own card.
document.addEventListener("pointerdown", ({ target }) => target.closest(".alternatives, .token") || hideAlternatives());
document.addEventListener("keydown", escape, { capture: true });

/** Shows the card when the pointer stays, as `showAlternatives`. */
export function showSoon(...what) {
  clearTimeout(coming);
  coming = setTimeout(() => showAlternatives(...what), PAUSE_MILLISECONDS);
}

/**
 * Shows the card of `token` at an element.
 *
 * `take(text)`, where there is one, is called when another token is chosen.
 */
export function showAlternatives(element, token, take) {
  clearTimeout(leaving);
  if ((anchor === element && !card.hidden) || !element.isConnected) return;
  hideAlternatives();
  anchor = element;
  anchor.classList.add("pointed");
  if (!card.isConnected) document.body.append(card);
  card.replaceChildren(...content(token, take));
  card.hidden = false;
  position();
}

/** Hides the card after a while. */
export function hideSoon() {
  clearTimeout(coming);
  clearTimeout(leaving);
  leaving = setTimeout(hideAlternatives, LINGER_MILLISECONDS);
}

/** Hides the card now. */
export function hideAlternatives() {
  clearTimeout(coming);
  if (card.hidden) return;
  card.hidden = true;
  anchor.classList.remove("pointed");
  anchor = null;
}

/** Moves the focus into the card, to the first token that could be taken. */
export function enterAlternatives() {
  card.querySelector("button")?.focus();
}

/** What a screen reader says of a token: what it is, how likely it was, and what came next to it. */
export function description({ text, logprob, top }) {
  const others = top.filter(([other]) => other !== text).slice(0, 3);
  const rest = others.map(([other, value]) => `${spoken(other)} ${percent(probability(value))}`);
  return [`${spoken(text)}, ${percent(probability(logprob))}`, ...rest].join("; ");
}

function content({ text, logprob, top }, take) {
  const among = top.some(([other]) => other === text);
  const shown = among ? top : [...top, [text, logprob]];
  const rest = 1 - shown.reduce((sum, [, value]) => sum + probability(value), 0);
  const rows = shown.map(([other, value]) => row(other, value, other === text, take));
  return [
    el("p", { class: "alternatives-head" }, el("b", {}, visible(text)), ` ${percent(probability(logprob))}`),
    el("ul", {}, ...rows),
    el("p", { class: "alternatives-rest" }, `All other tokens: ${percent(Math.max(0, rest))}`),
    take && shown.length > 1 ? el("p", { class: "alternatives-hint" }, "Choose one to go on from there.") : null,
  ].filter(Boolean);
}

function row(text, logprob, isTaken, take) {
  const share = probability(logprob);
  const bar = el("span", { class: "bar" });
  bar.style.setProperty("--share", share);
  const words = el("span", { class: "alternative-text" }, visible(text));
  const inside = [words, bar, el("span", { class: "share" }, percent(share))];
  // Half a character is no place to go on from.
  const label = `Go on with ${spoken(text)}, ${percent(share)}`;
  const usable = take && !isTaken && text !== "" && !text.includes("\uFFFD");
  const click = () => {
    hideAlternatives();
    take(text);
  };
  return el(
    "li",
    { class: isTaken ? "taken" : null },
    usable
      ? el("button", { type: "button", click, "aria-label": label }, ...inside)
      : el("span", { class: "row" }, ...inside),
  );
}

function position() {
  const token = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { width, height } = card.getBoundingClientRect();
  const below = token.bottom + GAP + height <= innerHeight;
  const left = Math.max(GAP, Math.min(token.left, innerWidth - width - GAP));
  const top = below ? token.bottom + GAP : Math.max(GAP, token.top - GAP - height);
  card.style.setProperty("left", `${left}px`);
  card.style.setProperty("top", `${top}px`);
}

// Out of the card back to the token, and from there out of everything; nothing else hears of it.
function escape(event) {
  if (event.key !== "Escape" || card.hidden) return;
  event.stopPropagation();
  if (card.contains(document.activeElement) && anchor.tabIndex >= 0) anchor.focus();
  else hideAlternatives();
}

function keydown(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const buttons = [...card.querySelectorAll("button")];
  buttons.at((buttons.indexOf(document.activeElement) + step) % buttons.length)?.focus();
}
