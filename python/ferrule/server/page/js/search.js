// Full-text search: a text matches when it has every word of the query, in any order and any case.

const EXCERPT_CHARACTERS = 80;
const CHARACTERS_BEFORE = 20;

/** Returns the words of a query; an empty query has none. */
export function wordsOf(query) {
  return fold(query).split(/\s+/).filter((word) => word !== "");
}

/** Returns whether a text has all words. */
export function matches(text, words) {
  const folded = fold(text);
  return words.every((word) => folded.includes(word));
}

/** Returns the part of a matching text at its first word, on one line. */
export function excerpt(text, words) {
  const line = text.normalize("NFC").replaceAll(/\s+/g, " ").trim();
  const folded = fold(line);
  const first = Math.min(...words.map((word) => folded.indexOf(word)));
  const start = first <= CHARACTERS_BEFORE ? 0 : first - CHARACTERS_BEFORE;
  const end = start + EXCERPT_CHARACTERS;
  return `${start > 0 ? "…" : ""}${line.slice(start, end)}${end < line.length ? "…" : ""}`;
}

function fold(text) {
  return text.normalize("NFC").toLowerCase();
}
