// What can be set for a conversation, as one table: the panel is made of it, files are checked against it, and what is
// set goes into the request under its name. What is not set is left to the server.

/** Sampling parameters: name, words for it, limits, and what it does in one line. */
export const PARAMETERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, hint: "0 takes the likeliest token each time" },
  { name: "top_p", label: "Top p", min: 0, max: 1, hint: "the fewest tokens that have this share together" },
  { name: "top_k", label: "Top k", min: -1, integer: true, hint: "the k likeliest tokens alone" },
  { name: "min_p", label: "Min p", min: 0, max: 1, hint: "none below this share of the likeliest" },
  { name: "max_tokens", label: "Max tokens", min: 1, integer: true, hint: "the longest an answer may get" },
  { name: "seed", label: "Seed", min: 0, integer: true, hint: "the same seed gives the same answer" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, hint: "above 1 avoids what was said" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, hint: "for each time a token came" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, hint: "for tokens that came at all" },
];

/** Default number of alternatives to request for each token; 0 requests none. */
export const ALTERNATIVES = { name: "alternatives", label: "Alternatives", min: 0, max: 20, integer: true, usual: 5 };

/** The number that a field holds: null when it is empty; throws a RangeError that says what is allowed. */
export function readNumber(parameter, text) {
  if (text.trim() === "") return null;
  const value = Number(text);
  const { label, min, max, integer } = parameter;
  const inside = value >= min && (max === undefined || value <= max);
  if (inside && (!integer || Number.isSafeInteger(value))) return value;
  const kind = integer ? "a whole number" : "a number";
  throw new RangeError(`${label}: ${kind} ${max === undefined ? `from ${min}` : `from ${min} to ${max}`}`);
}

// What the page makes of a request itself: it reads one answer, as a stream, to what is shown above it.
const OWN = ["n", "stream", "stream_options", "messages", "model"];

/** The first of an object's fields that a request cannot have besides the page's own; undefined where there is none. */
export function ownField(further) {
  return OWN.find((name) => Object.hasOwn(further, name));
}

/** The further fields of a request, as a JSON object: null when there are none; throws a SyntaxError. */
export function readFurther(text) {
  if (text.trim() === "") return null;
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SyntaxError("an object is needed: {…}");
  }
  const own = ownField(value);
  if (own) throw new SyntaxError(`${own} is set by the page`);
  return value;
}
