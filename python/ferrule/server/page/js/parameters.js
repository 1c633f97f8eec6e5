// Parameters of a conversation as one table, which the settings show, imported files are checked against, and requests
// are built from. A parameter without a value has the default of the model.

/**
 * Sampling parameters: name in the request, label, limits and effect. `slider` has the range of the slider, which may be
 * smaller than the allowed one, `defaultValue` the value of every model, and `unset` the text of a field without a value
 * and a default.
 */
export const PARAMETERS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 100,
    slider: { min: 0, max: 2, step: 0.05 },
    hint: "0 always selects the most likely token",
  },
  {
    name: "top_p",
    label: "Top p",
    min: 0,
    max: 1,
    slider: { min: 0, max: 1, step: 0.01 },
    hint: "Nucleus sampling: total probability of the candidates",
  },
  {
    name: "top_k",
    label: "Top k",
    min: -1,
    integer: true,
    slider: { min: 0, max: 200, step: 1 },
    hint: "Number of candidates; 0 for all",
  },
  {
    name: "min_p",
    label: "Min p",
    min: 0,
    max: 1,
    slider: { min: 0, max: 1, step: 0.01 },
    hint: "Minimum probability, relative to the most likely token",
  },
  {
    name: "max_tokens",
    label: "Max tokens",
    min: 1,
    integer: true,
    slider: { min: 64, max: 8192, step: 64 },
    hint: "Maximum length of the answer",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 0.01,
    slider: { min: 0.5, max: 2, step: 0.05 },
    hint: "Above 1 reduces repetition",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    min: -2,
    max: 2,
    slider: { min: -2, max: 2, step: 0.1 },
    defaultValue: 0,
    hint: "Penalty per earlier occurrence",
  },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    min: -2,
    max: 2,
    slider: { min: -2, max: 2, step: 0.1 },
    defaultValue: 0,
    hint: "Penalty for tokens that occurred",
  },
  {
    name: "seed",
    label: "Seed",
    min: 0,
    integer: true,
    unset: "random",
    hint: "The same seed gives the same answer; empty for a new one",
  },
];

/** Number of alternatives to request for each token; 0 requests none. */
export const ALTERNATIVES = {
  name: "alternatives",
  label: "Token alternatives",
  min: 0,
  max: 20,
  integer: true,
  defaultValue: 5,
  hint: "Number of alternatives to save for each token of an answer",
};

/** Parses a number; returns null if the text is empty, and throws a RangeError with the allowed values. */
export function parseNumber(parameter, text) {
  if (text.trim() === "") return null;
  const value = Number(text);
  if (isAllowed(parameter, value)) return value;
  throw new RangeError(`${parameter.label} must be ${requirement(parameter)}, got ${text.trim()}`);
}

/** Returns whether a value is a number that the parameter allows. */
export function isAllowed({ min, max = Infinity, integer }, value) {
  return (integer ? Number.isSafeInteger(value) : Number.isFinite(value)) && value >= min && value <= max;
}

/** Returns the allowed values as a text, such as "a number from 0 to 1". */
export function requirement({ min, max, integer }) {
  const kind = integer ? "an integer" : "a number";
  return max === undefined ? `${kind} >= ${min}` : `${kind} from ${min} to ${max}`;
}

// Fields that the page sets: it requests one streamed answer to the visible messages.
const RESERVED = ["n", "stream", "stream_options", "messages", "model"];

/** Returns the first field of an extra body that only the page may set, or undefined. */
export function reservedField(extraBody) {
  return RESERVED.find((name) => Object.hasOwn(extraBody, name));
}

/** Parses the extra body of a request, a JSON object; returns null if the text is empty, and throws a SyntaxError. */
export function parseExtraBody(text) {
  if (text.trim() === "") return null;
  const value = parseJson(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new SyntaxError("Extra body must be a JSON object, such as {\"ignore_eos\": true}");
  }
  const reserved = reservedField(value);
  if (reserved) throw new SyntaxError(`Extra body must not have the field ${reserved}, which the page sets`);
  return value;
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`Extra body is not valid JSON: ${error.message}`);
  }
}
