// The tokens of an answer with their alternatives: `{text, logprob, top: [[text, logprob], …]}`.
//
// A character may consist of several tokens (an emoji often has four). It belongs to the last of them; the others have
// the text "", so that the concatenated texts are the answer.

const encoder = new TextEncoder();
// Log-probability of tokens with probability zero, because JSON has no infinity.
const MIN_LOGPROB = -9999;
const NO_BREAK_SPACE = "\u00a0";

/** Converts the entries of a stream's `logprobs.content`, in order, to tokens. */
export class TokenReader {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });

  read({ token, bytes, logprob, top_logprobs: top }) {
    const raw = bytes ? Uint8Array.from(bytes) : encoder.encode(token);
    return {
      text: this.#decoder.decode(raw, { stream: true }),
      logprob: logprob ?? MIN_LOGPROB,
      top: (top ?? []).map((other) => [other.token, other.logprob ?? MIN_LOGPROB]),
    };
  }
}

// Probabilities below which a token is of the next level of certainty, from 0 (certain) to 4.
const CERTAINTY_LIMITS = [0.9, 0.7, 0.4, 0.1];

/** Labels of the levels of certainty. */
export const CERTAINTY_LABELS = ["≥ 90 %", "70 to 90 %", "40 to 70 %", "10 to 40 %", "< 10 %"];

/** Returns the level of certainty of a log-probability. */
export function certaintyLevel(logprob) {
  return CERTAINTY_LIMITS.filter((limit) => probability(logprob) < limit).length;
}

/** Returns the position of each token in `content`, `[{index, start, end, level}]`; empty if the texts do not match. */
export function locateTokens(tokens, content) {
  if (!tokens?.length || content === "") return [];
  const text = tokens.map((token) => token.text).join("");
  // Tokens of reasoning or markers may precede the content, and tokens of a stop sequence may follow it.
  const contentStart = text.startsWith(content) ? 0 : text.lastIndexOf(content);
  if (contentStart < 0) return [];
  const positions = [];
  let at = -contentStart;
  for (const [index, token] of tokens.entries()) {
    const start = Math.max(at, 0);
    at += token.text.length;
    const end = Math.min(at, content.length);
    if (end > start) positions.push({ index, start, end, level: certaintyLevel(token.logprob) });
  }
  return positions;
}

/** Returns the offset of a token in `content`, or its length for a token after it; -1 for other tokens. */
export function tokenOffset(tokens, content, index) {
  const positions = locateTokens(tokens, content);
  if (index > (positions.at(-1)?.index ?? Infinity)) return content.length;
  return positions.find((position) => position.index === index)?.start ?? -1;
}

/** Returns the probability of a log-probability. */
export function probability(logprob) {
  return Math.min(1, Math.exp(logprob));
}

/** Formats a probability: 98.3 %, 0.04 %, < 0.01 %. */
export function formatPercent(value) {
  const percent = value * 100;
  if (percent >= 99.95 && value < 1) return `> 99.9${NO_BREAK_SPACE}%`;
  if (percent > 0 && percent < 0.01) return `< 0.01${NO_BREAK_SPACE}%`;
  const digits = percent >= 10 ? 1 : 2;
  return `${percent.toFixed(digits)}${NO_BREAK_SPACE}%`;
}

/** Returns the text of a token for screen readers; a leading space is spoken, because it makes a different token. */
export function spokenText(text) {
  const spoken = text.replace(/^ /, "space ").replaceAll("\n", " new line ").replaceAll("\t", " tab ");
  return spoken.replaceAll("\uFFFD", " part of a character ").trim();
}

/** Returns the text of a token with symbols for whitespace. */
export function visibleText(text) {
  if (text === "") return "∅";
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\uFFFD", "▯");
}
