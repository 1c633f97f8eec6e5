// What an answer took, in words: time to the first token, tokens per second, tokens; and how full the context is.

import { el } from "./dom.js";
import { contextTokens, speed } from "./generation.js";

const NEARLY_FULL = 0.9;
const whole = new Intl.NumberFormat("en");

/** The figures of an answer, as far as they are known. */
export function figureList({ figures, finish }) {
  if (!figures) return [];
  const { firstToken, completionTokens, cachedTokens, waited } = figures;
  const rate = speed(figures);
  return [
    firstToken === undefined && waited !== undefined && figure(duration(waited), "until now", "waited"),
    firstToken !== undefined && figure(duration(firstToken), "to the first token", "ttft"),
    rate !== null && figure(`${whole.format(Math.round(rate * 10) / 10)}`, "tokens/s", "speed"),
    completionTokens > 0 && figure(whole.format(completionTokens), plural(completionTokens, "token"), "count"),
    cachedTokens > 0 && figure(whole.format(cachedTokens), "from the cache", "cached"),
    finish === "length" && figure("cut", "at the limit of tokens", "finish"),
    finish === "stopped" && figure("stopped", "", "finish"),
  ].filter(Boolean);
}

/** How full the context is behind an answer, as `{used, of, about}`; null where it is not known. */
export function contextUse(answers, models, model) {
  const of = models.find(({ id }) => id === model)?.max_model_len;
  if (!of) return null;
  // One that was refused took nothing.
  const counted = answers.filter(({ figures, error }) => figures && !(error && !figures.completionTokens));
  const last = counted.at(-1);
  if (!last) return { used: 0, of, about: false };
  const exact = contextTokens(last.figures);
  if (exact !== null) return { used: exact, of, about: false };
  // The server counts at the end; until then the answer before and what came since are a lower bound.
  const before = counted.slice(0, -1).findLast(({ figures }) => contextTokens(figures) !== null);
  return { used: (before ? contextTokens(before.figures) : 0) + (last.figures.completionTokens ?? 0), of, about: true };
}

/** Shows the use of the context in its meter. */
export function showContext(meter, use) {
  meter.hidden = use === null;
  if (use === null) return;
  const words = `${use.about ? "≥ " : ""}${whole.format(use.used)} of ${whole.format(use.of)}`;
  const bar = el("span", { class: "lead", "aria-hidden": "true" });
  meter.classList.toggle("nearly-full", use.used > NEARLY_FULL * use.of);
  bar.style.setProperty("--share", Math.min(1, use.used / use.of));
  const label = el("span", { class: "visually-hidden" }, "Context: ");
  meter.replaceChildren(label, el("span", {}, words, el("span", { class: "unit" }, " tokens")), bar);
}

function figure(value, words, name) {
  return el("span", { class: "figure", "data-figure": name }, el("b", {}, value), words ? ` ${words}` : null);
}

function plural(number, word) {
  return number === 1 ? word : `${word}s`;
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
