// Statistics as text: time to first token, tokens per second and number of tokens of an answer, and context usage.

import { el } from "./dom.js";
import { contextTokens, tokensPerSecond } from "./generation.js";

const NEARLY_FULL = 0.9;
const numberFormat = new Intl.NumberFormat("en");

/** Returns the elements of an answer's statistics, as far as they are known. */
export function statisticElements({ statistics, finishReason }) {
  if (!statistics) return [];
  const { firstToken, completionTokens, cachedTokens, elapsed } = statistics;
  const rate = tokensPerSecond(statistics);
  return [
    firstToken === undefined && elapsed !== undefined && statistic("elapsed", formatDuration(elapsed), "elapsed"),
    firstToken !== undefined && statistic("ttft", formatDuration(firstToken), "to first token"),
    rate !== null && statistic("rate", numberFormat.format(Math.round(rate * 10) / 10), "tokens/s"),
    completionTokens > 0 && tokenCount(completionTokens),
    cachedTokens > 0 && statistic("cached", numberFormat.format(cachedTokens), "cached prompt tokens"),
    finishReason === "length" && statistic("finish", "token limit reached", ""),
    finishReason === "loop" && statistic("finish", "stopped, because the answer repeats itself", ""),
    finishReason === "stopped" && statistic("finish", "stopped", ""),
  ].filter(Boolean);
}

/** Returns the context usage after the last answer, `{used, limit, isLowerBound}`; null if the limit is unknown. */
export function contextUsage(answers, models, model) {
  const limit = models.find(({ id }) => id === model)?.max_model_len;
  if (!limit) return null;
  // A rejected request has used no context.
  const counted = answers.filter(({ statistics, error }) => statistics && !(error && !statistics.completionTokens));
  const last = counted.at(-1);
  if (!last) return { used: 0, limit, isLowerBound: false };
  const exact = contextTokens(last.statistics);
  if (exact !== null) return { used: exact, limit, isLowerBound: false };
  // The server reports the usage at the end. Until then, the previous answer and the new tokens are a lower bound.
  const previous = counted.slice(0, -1).findLast(({ statistics }) => contextTokens(statistics) !== null);
  const used = (previous ? contextTokens(previous.statistics) : 0) + (last.statistics.completionTokens ?? 0);
  return { used, limit, isLowerBound: true };
}

/** Shows the context usage in its meter; null hides the meter. */
export function showContextUsage(meter, usage) {
  meter.hidden = usage === null;
  if (usage === null) return;
  const { used, limit, isLowerBound } = usage;
  const text = `${isLowerBound ? "≥ " : ""}${numberFormat.format(used)} of ${numberFormat.format(limit)}`;
  const bar = el("span", { class: "meter-bar", "aria-hidden": "true" });
  meter.classList.toggle("nearly-full", used > NEARLY_FULL * limit);
  bar.style.setProperty("--fraction", Math.min(1, used / limit));
  const label = el("span", { class: "visually-hidden" }, "Context: ");
  meter.replaceChildren(label, el("span", {}, text, el("span", { class: "unit" }, " tokens")), bar);
}

function statistic(name, value, label) {
  return el("span", { class: "statistic", "data-statistic": name }, el("b", {}, value), label ? ` ${label}` : null);
}

function tokenCount(count) {
  return statistic("count", numberFormat.format(count), count === 1 ? "token" : "tokens");
}

function formatDuration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
