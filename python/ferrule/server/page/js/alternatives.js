// The alternatives card: the candidates for a token with their probabilities. It opens beside a token that the pointer
// or the focus is on; selecting a candidate continues the answer from there.

import { el } from "./dom.js";
import { formatPercent, probability, spokenText, visibleText } from "./tokens.js";

// The delays let the pointer cross tokens without opening cards, and move from a token to its card.
const SHOW_DELAY_MILLISECONDS = 120;
const HIDE_DELAY_MILLISECONDS = 300;
const GAP = 6;

const LABEL = "Token alternatives";

const card = el("div", { class: "alternatives", role: "dialog", "aria-label": LABEL, hidden: true });
let anchor = null;
let pending = null;
let showTimer = null;
let hideTimer = null;

card.addEventListener("pointerenter", () => {
  cancelShow();
  clearTimeout(hideTimer);
});
card.addEventListener("pointerleave", scheduleHide);
card.addEventListener("keydown", onKeydown);
document.addEventListener("scroll", ({ target }) => card.contains(target) || hideAlternatives(), { capture: true });
// A press on another token opens that token's card.
document.addEventListener("pointerdown", ({ target }) => target.closest(".alternatives, .token") || hideAlternatives());
document.addEventListener("keydown", onEscape, { capture: true });

/**
 * Shows the card of the token that the pointer is on, after a delay. `argumentsOf(element)` returns the other arguments of
 * `showAlternatives` for the element of a token.
 */
export function showOnHover(container, argumentsOf) {
  const onPointer = ({ target }) => {
    const element = target.closest(".token:not(.token-button)");
    if (element && element !== pending) scheduleShow(element, ...argumentsOf(element));
  };
  // A mouse must move: "pointerover" also happens when the page moves a token below a resting mouse, whose card would
  // cover the button that the user is about to press.
  container.addEventListener("pointermove", onPointer);
  container.addEventListener("pointerover", (event) => event.pointerType !== "mouse" && onPointer(event));
  // Lifting a finger is a "pointerout" too; the card of a tapped token stays open until the next tap.
  container.addEventListener("pointerout", ({ pointerType }) => pointerType === "mouse" && scheduleHide());
}

function scheduleShow(element, ...rest) {
  cancelShow();
  pending = element;
  showTimer = setTimeout(() => showAlternatives(element, ...rest), SHOW_DELAY_MILLISECONDS);
}

function cancelShow() {
  clearTimeout(showTimer);
  pending = null;
}

/**
 * Shows the card of `token` at an element.
 *
 * `onSelect(text)` is called when the user selects another token; null shows the alternatives without buttons.
 */
export function showAlternatives(element, token, onSelect) {
  clearTimeout(hideTimer);
  if ((anchor === element && !card.hidden) || !element.isConnected) return;
  hideAlternatives();
  anchor = element;
  anchor.classList.add("active");
  if (!card.isConnected) document.body.append(card);
  card.replaceChildren(...content(token, onSelect));
  card.hidden = false;
  position();
}

function scheduleHide() {
  cancelShow();
  clearTimeout(hideTimer);
  hideTimer = setTimeout(hideAlternatives, HIDE_DELAY_MILLISECONDS);
}

/** Hides the card. */
export function hideAlternatives() {
  cancelShow();
  if (card.hidden) return;
  card.hidden = true;
  anchor.classList.remove("active");
  anchor = null;
}

/** Moves the focus to the first selectable token of the card. */
export function focusAlternatives() {
  card.querySelector("button")?.focus();
}

/** Description of a token for screen readers: its text, its probability and the most likely alternatives. */
export function tokenDescription({ text, logprob, top }) {
  const others = top.filter(([other]) => other !== text).slice(0, 3);
  const rest = others.map(([other, value]) => `${spokenText(other)} ${formatPercent(probability(value))}`);
  return [`${spokenText(text)}, ${formatPercent(probability(logprob))}`, ...rest].join("; ");
}

function content({ text, logprob, top }, onSelect) {
  const isListed = top.some(([other]) => other === text);
  const candidates = isListed ? top : [...top, [text, logprob]];
  const rest = 1 - candidates.reduce((sum, [, value]) => sum + probability(value), 0);
  const rows = candidates.map(([other, value]) => row(other, value, other === text, onSelect));
  const heading = el("b", {}, visibleText(text));
  return [
    el("p", { class: "alternatives-head" }, heading, ` ${formatPercent(probability(logprob))}`),
    el("ul", {}, ...rows),
    el("p", { class: "alternatives-rest" }, `All other tokens: ${formatPercent(Math.max(0, rest))}`),
    onSelect && candidates.length > 1
      ? el("p", { class: "alternatives-hint" }, "Select a token to continue from there.")
      : null,
  ].filter(Boolean);
}

function row(text, logprob, isSampled, onSelect) {
  const value = probability(logprob);
  const bar = el("span", { class: "bar" });
  bar.style.setProperty("--probability", value);
  const label = el("span", { class: "alternative-text" }, visibleText(text));
  const cells = [label, bar, el("span", { class: "probability" }, formatPercent(value))];
  const description = `Continue with ${spokenText(text)}, ${formatPercent(value)}`;
  // An answer cannot continue after an incomplete UTF-8 character.
  const isSelectable = onSelect && !isSampled && text !== "" && !text.includes("\uFFFD");
  const click = () => {
    hideAlternatives();
    onSelect(text);
  };
  return el(
    "li",
    { class: isSampled ? "sampled" : null },
    isSelectable
      ? el("button", { type: "button", click, "aria-label": description }, ...cells)
      : el("span", { class: "row" }, ...cells),
  );
}

function position() {
  const token = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { width, height } = card.getBoundingClientRect();
  const fitsBelow = token.bottom + GAP + height <= innerHeight;
  const left = Math.max(GAP, Math.min(token.left, innerWidth - width - GAP));
  const top = fitsBelow ? token.bottom + GAP : Math.max(GAP, token.top - GAP - height);
  card.style.setProperty("left", `${left}px`);
  card.style.setProperty("top", `${top}px`);
}

// Escape moves the focus from the card to its token; a second Escape closes the card. Other listeners do not get it.
function onEscape(event) {
  if (event.key !== "Escape" || card.hidden) return;
  event.stopPropagation();
  if (card.contains(document.activeElement) && anchor.tabIndex >= 0) anchor.focus();
  else hideAlternatives();
}

function onKeydown(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const buttons = [...card.querySelectorAll("button")];
  buttons.at((buttons.indexOf(document.activeElement) + step) % buttons.length)?.focus();
}
