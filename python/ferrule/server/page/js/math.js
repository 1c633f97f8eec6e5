// Formulas in LaTeX: `$…$`, `$$…$$`, `\(…\)` and `\[…\]`. They become Markdown tokens of the type "math", and KaTeX, which
// is loaded with the first formula, creates their elements. A formula that KaTeX cannot parse is shown as its source.

import { el } from "./dom.js";

const MAX_FORMULA_CHARACTERS = 5_000;
const MAX_INLINE_CHARACTERS = 500;
// Without a limit, a formula could cover the page or keep it busy.
const OPTIONS = { output: "htmlAndMathml", strict: "ignore", trust: false, maxSize: 30, maxExpand: 500 };
const MAX_CACHED_FORMULAS = 200;

const CLOSING = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };
const OPEN_BLOCK = /^ {0,3}(\$\$|\\\[)/;
const BLOCK_CANDIDATE = /\n(?= {0,3}(?:\$\$|\\\[))/g;
const INLINE_CANDIDATE = /\$|\\[([]/;
const DOLLARS = new RegExp(`^\\$((?:\\\\[^\\n]|[^\\\\$\\n]){1,${MAX_INLINE_CHARACTERS}})\\$(?![\\dA-Z$])`);
const MATH_CHARACTER = /[\\^_=+<>{}|*]/;

/** Extensions of the lexer of the marked library. */
export const MATH_EXTENSIONS = {
  block: [blockToken],
  startBlock: [blockStart],
  inline: [inlineToken],
  startInline: [(source) => source.search(INLINE_CANDIDATE)],
  childTokens: {},
};

// A formula on separate lines. One that is not closed yet is not parsed as Markdown, so that it does not change its
// appearance several times while it is generated.
function blockToken(source) {
  const opening = OPEN_BLOCK.exec(source);
  if (!opening) return undefined;
  const text = source.slice(0, MAX_FORMULA_CHARACTERS);
  const start = opening[0].length;
  const end = text.indexOf(CLOSING[opening[1]], start);
  const emptyLine = text.slice(start).search(/\n[ \t]*\n\s*\S/);
  if (end < 0) {
    const isUnfinished = emptyLine < 0 && text.length === source.length;
    return isUnfinished ? { type: "math", raw: source, formula: null, isDisplay: true } : undefined;
  }
  const [after] = /^[ \t]*(?:\n+|$)/.exec(source.slice(end + 2)) ?? [];
  const formula = text.slice(start, end).trim();
  if (after === undefined || formula === "" || (emptyLine >= 0 && start + emptyLine < end)) return undefined;
  if (opening[1] === "\\[" && isProse(formula, /[A-Za-z]{3}/)) return undefined;
  return { type: "math", raw: source.slice(0, end + 2 + after.length), formula, isDisplay: true };
}

function blockStart(source) {
  // A paragraph ends with an empty line, so that a formula after it cannot interrupt the paragraph.
  const end = source.search(/\n[ \t]*\n/);
  const paragraph = end < 0 ? source : source.slice(0, end + 1);
  for (const { index } of paragraph.matchAll(BLOCK_CANDIDATE)) {
    if (blockToken(source.slice(index + 1))) return index + 1;
  }
  return -1;
}

function inlineToken(source, tokens) {
  const closing = CLOSING[source.slice(0, 2)];
  if (!closing) return source.startsWith("$") ? dollarToken(source, tokens) : undefined;
  const end = source.slice(0, MAX_FORMULA_CHARACTERS).indexOf(closing, 2);
  const formula = source.slice(2, end).trim();
  // Markdown has backslashes before ordinary brackets, too.
  if (end < 0 || formula === "" || (closing !== "$$" && isProse(formula, /[A-Za-z]{3}/))) return undefined;
  return { type: "math", raw: source.slice(0, end + 2), formula, isDisplay: closing !== "\\)" };
}

// Prices are not formulas: in "$5 and $6" a space precedes the second sign, and in "$5-$6" a digit follows it.
function dollarToken(source, tokens) {
  const [raw, formula] = DOLLARS.exec(source) ?? [];
  if (raw === undefined || /^\s|\s$/.test(formula)) return undefined;
  const before = tokens.at(-1);
  if (before?.type === "text" && /[\p{L}\p{N}$]$/u.test(before.raw)) return undefined;
  if (/^\d|\s/.test(formula) && isProse(formula, /[A-Za-z]{2}/)) return undefined;
  return { type: "math", raw, formula, isDisplay: false };
}

function isProse(formula, word) {
  return word.test(formula) && !MATH_CHARACTER.test(formula);
}

// A long formula scrolls sideways, so the keyboard must be able to focus it.
const SCROLLING = { role: "group", tabindex: "0", "aria-label": "Formula" };

/** Creates the element of a formula between other blocks; `level` is that of its least certain token. */
export function mathBlock({ formula, raw }, level) {
  const element = el("div", { class: "math-block", "data-certainty": level, ...SCROLLING });
  return fill(element, formula, raw.trim(), true);
}

/** Creates the element of a formula within a text. */
export function mathSpan({ formula, raw, isDisplay }, level) {
  const attributes = isDisplay ? { class: "math-line", ...SCROLLING } : { class: "math" };
  const element = el("span", { "data-certainty": level, ...attributes });
  return fill(element, formula, raw, isDisplay);
}

/** Waits until the formulas that exist are rendered. */
export async function formulasRendered() {
  await loading?.catch(() => undefined);
}

// The library as soon as it is loaded, and the promise of it.
let katex = null;
let loading = null;
// The rendered formulas: an unfinished block is rendered again for each of its tokens.
const cache = new Map();

function fill(element, formula, raw, isDisplay) {
  showSource(element, raw);
  if (formula === null) return element;
  if (katex) showFormula(element, formula, raw, isDisplay);
  // Without the library, such as after the server has stopped, the source stays.
  else load().then(() => showFormula(element, formula, raw, isDisplay), () => (loading = null));
  return element;
}

function load() {
  loading ??= Promise.all([import("../vendor/katex/katex.min.js"), loadStyle()]).then(() => (katex = globalThis.katex));
  return loading;
}

function loadStyle() {
  return new Promise((resolve, reject) => {
    const href = new URL("../vendor/katex/katex.min.css", import.meta.url).href;
    document.head.append(el("link", { rel: "stylesheet", href, load: resolve, error: reject }));
  });
}

function showFormula(element, formula, raw, isDisplay) {
  const key = `${isDisplay} ${formula}`;
  try {
    if (!cache.has(key)) {
      if (cache.size >= MAX_CACHED_FORMULAS) cache.delete(cache.keys().next().value);
      cache.set(key, rendered(formula, isDisplay));
    }
    element.classList.remove("math-source");
    element.replaceChildren(cache.get(key).cloneNode(true));
  } catch {
    showSource(element, raw);
  }
}

function rendered(formula, displayMode) {
  const holder = el("span");
  katex.render(formula, holder, { ...OPTIONS, displayMode });
  return holder.firstChild;
}

function showSource(element, raw) {
  element.classList.add("math-source");
  element.textContent = raw;
}
