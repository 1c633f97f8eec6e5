// Markdown as elements. marked says what the tokens of the text are; elements are made of them here, from a fixed set,
// so that there is no HTML to sanitize: what a model writes as HTML is shown as the text that it is. Images are links:
// nothing is loaded because a model names it.

import { Lexer } from "../vendor/marked.esm.js";
import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { Source } from "./source.js";

const OPTIONS = { gfm: true, breaks: true, pedantic: false, smartypants: false, mangle: false };
const PROTOCOLS = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/;
// marked compares each * and _ with each behind it, over the text between: 20 kB of them take seconds. Marks times
// characters, which a long paragraph of a text that is one has a tenth of.
const EMPHASIS_BUDGET = 2_000_000;
// Characters behind a block in which an empty line is looked for.
const NEAR = 200;
// How much of its text an element shows by blocks that stay: {text, count, last}.
const settled = new WeakMap();

/**
 * Shows markdown in an element. Blocks that are finished are kept and not read again, so that a stream costs what it
 * adds, and a selection in a part that is finished survives.
 */
export function renderMarkdown(container, text, placed) {
  const kept = settledIn(container, text);
  const source = new Source(text, placed, kept.text.length);
  const blocks = lex(text.slice(kept.text.length));
  const fresh = blocks.map((block) => source.within(block.raw, () => blockElement(block, source)));
  for (const element of [...container.children].slice(kept.count)) element.remove();
  container.append(...fresh);
  settle(container, text, kept, blocks);
}

function settledIn(container, text) {
  const kept = settled.get(container);
  const isThere = kept && text.startsWith(kept.text) && container.children[kept.count - 1] === kept.last;
  return isThere ? kept : { text: "", count: 0, last: undefined };
}

function settle(container, text, kept, blocks) {
  let { count } = kept;
  let end = kept.text.length;
  let at = end;
  // The last two may still change their meaning: a line of dashes makes a heading of the one above it, or of all lines
  // up to an empty one.
  for (const [position, { raw }] of blocks.slice(0, -2).entries()) {
    const found = text.indexOf(raw, at);
    // What stands between is a definition, which all that comes behind may need.
    if (found < 0 || text.slice(at, found).trim() !== "") break;
    at = found + raw.length;
    if (!/\n[ \t]*\n$/.test(raw) && !/^[ \t]*\n[ \t]*\n/.test(text.slice(at, at + NEAR))) continue;
    end = at;
    count = kept.count + position + 1;
  }
  settled.set(container, { text: text.slice(0, end), count, last: container.children[count - 1] });
}

function lex(text) {
  try {
    // Without the end of its line marked takes code that is not closed yet for paragraphs.
    return new BoundedLexer({ ...OPTIONS }).lex(`${text}\n`).filter(isShown);
  } catch {
    // Nested deeper than the stack is: shown as it was written.
    return [{ type: "plain", raw: text }];
  }
}

class BoundedLexer extends Lexer {
  inlineTokens(text, tokens = []) {
    const marks = text.match(/[*_]/g)?.length ?? 0;
    if (marks * text.length <= EMPHASIS_BUDGET) return super.inlineTokens(text, tokens);
    tokens.push({ type: "text", raw: text, text });
    return tokens;
  }
}

function isShown({ type }) {
  return type !== "space";
}

const BLOCKS = {
  heading: (token, source) => el(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens, source)),
  paragraph: (token, source) => el("p", {}, ...inline(token.tokens, source)),
  blockquote: (token, source) => el("blockquote", {}, ...blockElements(token.tokens, source)),
  code: (token, source) => codeBlock(token.text, token.lang, source.text(token.text)),
  hr: () => el("hr"),
  list: (token, source) =>
    el(
      token.ordered ? "ol" : "ul",
      { start: token.ordered && token.start !== 1 ? token.start : null },
      ...token.items.map((item) => source.within(item.raw, () => listItem(item, source))),
    ),
  table: (token, source) =>
    el(
      "div",
      { class: "table", role: "region", tabindex: "0", "aria-label": "Table" },
      el(
        "table",
        {},
        el("thead", {}, row("th", token.header, token.align, source)),
        el("tbody", {}, ...token.rows.map((cells) => row("td", cells, token.align, source))),
      ),
    ),
  text: (token, source) => el("p", {}, ...(token.tokens ? inline(token.tokens, source) : source.text(token.raw))),
};

function blockElement(token, source) {
  const make = BLOCKS[token.type];
  return make ? make(token, source) : el("p", { class: "plain" }, ...source.text(token.raw.trimEnd()));
}

function blockElements(tokens, source) {
  return tokens.filter(isShown).map((token) => source.within(token.raw, () => blockElement(token, source)));
}

function listItem(item, source) {
  const mark = item.task ? el("span", { class: "task" }, item.checked ? "☑ " : "☐ ") : null;
  // The text of a tight list stands in its items without paragraphs.
  const parts = item.tokens.map((token) => {
    if (token.type === "space") return [];
    if (token.type === "text" && !item.loose) {
      return source.within(token.raw, () => (token.tokens ? inline(token.tokens, source) : source.text(token.raw)));
    }
    return [source.within(token.raw, () => blockElement(token, source))];
  });
  return el("li", {}, mark, ...parts.flat());
}

function row(tag, cells, align, source) {
  const cell = ({ tokens }, column) =>
    el(tag, { class: align[column] ? `align-${align[column]}` : null }, ...inline(tokens, source));
  return el("tr", {}, ...cells.map(cell));
}

const INLINE = {
  strong: (token, source) => [el("strong", {}, ...inline(token.tokens, source))],
  em: (token, source) => [el("em", {}, ...inline(token.tokens, source))],
  del: (token, source) => [el("del", {}, ...inline(token.tokens, source))],
  br: () => [el("br")],
  codespan: (token, source) => [el("code", {}, ...source.text(unescaped(token.text)))],
  escape: (token, source) => source.written(token.raw, token.raw.slice(1)),
  link: (token, source) => [link(token.href, inline(token.tokens, source))],
  image: (token) => [link(token.href, [`Image: ${unescaped(token.text) || unescaped(token.href)}`])],
  html: (token, source) => (/^<br\s*\/?>$/i.test(token.raw) ? [el("br")] : source.text(token.raw)),
  text: (token, source) => (token.tokens ? inline(token.tokens, source) : plain(token.raw, source)),
};

function inline(tokens, source) {
  return tokens.flatMap((token) =>
    source.within(token.raw, () => (INLINE[token.type] ?? INLINE.html)(token, source)),
  );
}

function plain(raw, source) {
  const nodes = [];
  let rest = raw;
  for (let match; (match = ENTITY.exec(rest)); rest = rest.slice(match.index + match[0].length)) {
    if (match.index > 0) nodes.push(...source.text(rest.slice(0, match.index)));
    nodes.push(...source.written(match[0], entity(match)));
  }
  return rest === "" ? nodes : [...nodes, ...source.text(rest)];
}

function entity([, decimal, hexadecimal, name]) {
  if (name) return ENTITIES[name];
  const code = decimal ? Number(decimal) : Number.parseInt(hexadecimal, 16);
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\uFFFD";
}

/** marked escapes what it expects to be put into HTML. */
function unescaped(text) {
  return text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => (name === "#39" ? "'" : ENTITIES[name]));
}

function link(href, children) {
  const url = URL.canParse(unescaped(href)) ? new URL(unescaped(href)) : null;
  // Where a link leads nowhere that it should, its words remain.
  if (!PROTOCOLS.includes(url?.protocol)) return el("span", {}, ...children);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
