// The tokens of an answer and what else each could have been: `{text, logprob, top: [[text, logprob], …]}`.
//
// A character may take several tokens (an emoji often takes four). It belongs to the last of them; the others hold "",
// so that the texts of all tokens together are the answer's.

const encoder = new TextEncoder();
// What JSON cannot say: the logarithm of zero.
const NEVER = -9999;
// A line does not end before the sign.
const SPACE = "\u00a0";

/** Turns the entries of `logprobs.content` of a stream, one after the other, into tokens. */
export class TokenReader {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });

  read({ token, bytes, logprob, top_logprobs: top }) {
    const raw = bytes ? Uint8Array.from(bytes) : encoder.encode(token);
    return {
      text: this.#decoder.decode(raw, { stream: true }),
      logprob: logprob ?? NEVER,
      top: (top ?? []).map((other) => [other.token, other.logprob ?? NEVER]),
    };
  }
}

/** Where each token lies in `content`: `[{index, start, end}]`, or none where the tokens do not spell it. */
export function place(tokens, content) {
  if (!tokens?.length || content === "") return [];
  const spelled = tokens.map(({ text }) => text).join("");
  // Tokens of a reasoning part, or of marks around the answer, come before it, and of a stop string behind it.
  const from = spelled.startsWith(content) ? 0 : spelled.lastIndexOf(content);
  if (from < 0) return [];
  const placed = [];
  let at = -from;
  tokens.forEach(({ text }, index) => {
    const start = Math.max(at, 0);
    at += text.length;
    const end = Math.min(at, content.length);
    if (end > start) placed.push({ index, start, end });
  });
  return placed;
}

/** Where in `content` a token begins, also where it is not shown itself, as the end of the answer; -1 for nowhere. */
export function offsetOf(tokens, content, index) {
  const placed = place(tokens, content);
  if (index > (placed.at(-1)?.index ?? Infinity)) return content.length;
  return placed.find((token) => token.index === index)?.start ?? -1;
}

/** The probability of a token, from its logarithm. */
export function probability(logprob) {
  return Math.min(1, Math.exp(logprob));
}

/** A probability as people read it: 98.3 %, 0.04 %, < 0.01 %. */
export function percent(value) {
  const hundredths = value * 100;
  if (hundredths >= 99.95 && value < 1) return `> 99.9${SPACE}%`;
  if (hundredths > 0 && hundredths < 0.01) return `< 0.01${SPACE}%`;
  const digits = hundredths >= 10 ? 1 : 2;
  return `${hundredths.toFixed(digits)}${SPACE}%`;
}

/** A token's text as it is read out: a space before a word makes it another token. */
export function spoken(text) {
  const said = text.replace(/^ /, "space ").replaceAll("\n", " new line ").replaceAll("\t", " tab ");
  return said.replaceAll("\uFFFD", " part of a character ").trim();
}

/** A token's text with what cannot be seen made visible. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\uFFFD", "▯");
}
