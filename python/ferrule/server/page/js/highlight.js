// Highlighting of code: finds comments, strings, numbers, keywords and names with the expressions of the language, and
// colors the text nodes of a code block. It keeps the elements of tokens, so that their alternatives stay available.

import { el } from "./dom.js";
import { LANGUAGES } from "./languages.js";

// Longer code stays plain.
const MAX_CHARACTERS = 100_000;
// Where several kinds begin at the same character, the first of these has precedence.
const KINDS = ["comment", "meta", "keyword", "name", "string", "number", "deleted", "word"];
const byName = new Map();
const scanners = new Map();

for (const [name, language] of Object.entries(LANGUAGES)) {
  for (const alias of [name, ...(language.aliases?.split(/\s+/) ?? [])]) byName.set(alias, language);
}

/** Returns the colored parts of code, `[{start, end, kind}]` in order; an unknown language has none. */
export function highlight(text, languageName) {
  const language = byName.get(languageName.toLowerCase());
  if (!language || text.length > MAX_CHARACTERS) return [];
  if (!scanners.has(language)) scanners.set(language, createScanner(language));
  const { expression, words } = scanners.get(language);
  const parts = [];
  for (const { 0: found, index: start, groups } of text.matchAll(expression)) {
    const end = start + found.length;
    let kind = KINDS.find((each) => groups[each] !== undefined);
    if (kind === "word") kind = wordKind(language.isCaseless ? found.toLowerCase() : found, words, text[end]);
    if (kind !== null) parts.push({ start, end, kind });
  }
  return parts;
}

function createScanner(language) {
  const kinds = KINDS.filter((kind) => kind in language);
  const source = kinds.map((kind) => `(?<${kind}>${language[kind]})`).join("|");
  return { expression: new RegExp(source, "gm"), words: new Set(language.words?.split(/\s+/)) };
}

function wordKind(word, words, next) {
  if (words.has(word)) return "keyword";
  return next === "(" ? "function" : null;
}

/** Colors the nodes of a text, text nodes and elements of tokens, and returns the new nodes. */
export function colorNodes(nodes, parts) {
  let offset = 0;
  let first = 0;
  return nodes.flatMap((node) => {
    const text = node.textContent;
    const end = offset + text.length;
    const colored = [];
    let at = offset;
    const addPlain = (to) => to > at && colored.push(document.createTextNode(text.slice(at - offset, to - offset)));
    while (first < parts.length && parts[first].end <= offset) first++;
    for (let i = first; i < parts.length && parts[i].start < end; i++) {
      const start = Math.max(parts[i].start, at);
      const partEnd = Math.min(parts[i].end, end);
      addPlain(start);
      colored.push(el("span", { class: `code-${parts[i].kind}` }, text.slice(start - offset, partEnd - offset)));
      at = partEnd;
    }
    addPlain(end);
    offset = end;
    if (node.nodeType === Node.TEXT_NODE) return colored;
    node.replaceChildren(...colored);
    return [node];
  });
}
